"""The attack table again as an ordinary user, and in the tiers that only some users can have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from .conftest import ROOT, as_user

pytestmark = [pytest.mark.attack, pytest.mark.slow]


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs as an ordinary user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv and unshare of util-linux")
@pytest.mark.parametrize(("uid", "tier"), [(1001, "full"), (0, "uid"), (1001, "landlock")])
def test_attack_table_holds_for(uid: int, tier: str) -> None:
    tests = [
        str(ROOT / "tests" / "sandbox" / name)
        for name in ("test_attacks.py", "test_sandbox.py", "test_session.py")
    ]
    inner = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tier, *tests]
    done = subprocess.run(
        as_user(uid, *inner), cwd="/", capture_output=True, text=True, timeout=900, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp"},
    )  # fmt: skip
    report = done.stdout[-3000:] + done.stderr[-2000:]
    assert done.returncode == 0, report
    assert "passed" in report
    assert "skipped" not in report, report
