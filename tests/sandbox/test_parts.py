"""The parts by themselves: the system-call filter, the text border, what is shown of the machine."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import struct
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from surefoot.sandbox import BARE, Limits, Profile, Result, Status, Tier
from surefoot.sandbox.execution import Job, _Execution, end_status
from surefoot.sandbox.inside import filters, kernel
from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.layout import carve, describe, environment
from surefoot.sandbox.text import clean

# ---- the filter, run by a small machine of our own

ALLOW, KILL, REFUSE = "allow", "kill", "refuse"
X86, ARM = 0xC000003E, 0xC00000B7


def verdict(program: bytes, number: int, *arguments: int, arch: int = X86) -> str | int:
    """What a seccomp program answers: allow, kill, or an errno."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(a & (1 << 64) - 1 for a in (*arguments, *[0] * 6)[:6]))
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = held = 0
    while True:
        code, true, false, value = steps[at]
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            held &= value
        elif code in (0x15, 0x35, 0x45):
            passed = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += true if passed else false
        elif code == 0x06:
            kind = value & 0xFFFF0000
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(kind, value & 0xFFFF)
        else:
            raise AssertionError(f"instruction {code:#x}")


FULL = {"sockets": False, "shared_files": False, "alone": None}
LOCAL = {**FULL, "sockets": True}
SHARED = {"sockets": False, "shared_files": True, "alone": 77}


@pytest.mark.parametrize("options", [FULL, LOCAL, SHARED], ids=["full", "loopback", "landlock"])
def test_filter_is_short_enough_and_refuses_what_it_must(options: dict) -> None:
    program = filters.program(**options)
    assert len(program) // 8 < 4096
    for name, (number, _) in filters._ALWAYS.items():
        assert verdict(program, number) == errno.EPERM, name
    for number in (453, 1000, 0x40000000 | 59, 0xFFFFFFFF):  # unknown, and the x32 names of known ones
        assert verdict(program, number) == errno.ENOSYS
    assert verdict(program, 0, arch=0x40000003) == KILL  # 32-bit calls have other numbers
    assert verdict(program, 435) == errno.ENOSYS
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, 56, flag | 17) == errno.EPERM
        assert verdict(program, 56, flag | 0x10000) == errno.EPERM
    assert verdict(program, 16, 0, 0x5412) == errno.EPERM
    assert verdict(program, 157, 1, 0) == errno.EPERM
    for number, arguments in (
        (0, ()),
        (1, ()),
        (9, ()),
        (59, ()),
        (16, (0, 0x5401)),
        (157, (15,)),
        (53, (1, 1)),
    ):
        assert verdict(program, number, *arguments) == ALLOW
    assert verdict(program, 56, 0x10000 | 0xF00) == ALLOW  # a thread


def test_filter_lets_each_tier_do_what_it_should() -> None:
    full, shared = filters.program(**FULL), filters.program(**SHARED)
    assert verdict(full, 56, 17) == verdict(full, 57) == ALLOW
    assert verdict(shared, 56, 17) == verdict(shared, 57) == verdict(shared, 58) == errno.EPERM
    assert verdict(full, 62, 1234, 9) == verdict(shared, 62, 77, 9) == ALLOW
    for pid in (78, 0, -1, -77, 1):
        assert verdict(shared, 62, pid, 9) == errno.EPERM
        assert verdict(shared, 234, pid, pid, 9) == errno.EPERM
    assert verdict(shared, 302, 0) == ALLOW
    assert verdict(shared, 302, 1234) == errno.EPERM
    assert [verdict(shared, 72, 5, command) for command in (1, 2, 8, 10, 15)] == [ALLOW, ALLOW] + [
        errno.EPERM
    ] * 3
    assert verdict(shared, 90) == verdict(shared, 280) == 0  # success without effect
    assert verdict(full, 90) == verdict(full, 280) == ALLOW


@given(
    family=st.integers(0, 50),
    kind=st.integers(0, 15),
    flags=st.sampled_from([0, 0o4000, 0o2000000, 0o2004000]),
)
def test_only_the_loopback_profile_opens_sockets_and_only_of_local_kinds(
    family: int, kind: int, flags: int
) -> None:
    good = family in (1, 2, 10) and kind in (1, 2)
    assert verdict(filters.program(**LOCAL), 41, family, kind | flags) == (ALLOW if good else errno.EPERM)
    assert verdict(filters.program(**FULL), 41, family, kind | flags) == errno.EPERM


def test_filter_of_the_other_architecture_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MACHINE", "aarch64")
    program = filters.program.__wrapped__(**SHARED)  # it keeps what it made for this machine
    for name, (_, number) in filters._ALWAYS.items():
        if number >= 0:
            assert verdict(program, number, arch=ARM) == errno.EPERM, name
    assert verdict(program, 198, 2, 1, arch=ARM) == errno.EPERM
    assert verdict(program, 220, 17, arch=ARM) == errno.EPERM
    assert verdict(program, 63, arch=ARM) == verdict(program, 64, arch=ARM) == ALLOW
    assert verdict(program, 63, arch=X86) == KILL


# ---- text


@given(st.binary(max_size=200))
def test_clean_text_has_no_control_but_newline_and_tab_and_can_be_encoded(data: bytes) -> None:
    text = clean(data)
    assert all(unicodedata.category(c) != "Cc" or c in "\n\t" for c in text)
    text.encode("utf-8")
    assert clean(text.encode()) == text


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))))
def test_clean_keeps_printable_text_as_it_is(text: str) -> None:
    assert clean(text.encode()) == text


# ---- what untrusted bytes do to the supervisor


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_outputs_and_reports_make_results_and_no_crash(number: int) -> None:
    rng = random.Random(0)

    class Ended:
        """A fork server that has already told of the end."""

        group = None

        def kill(self, number: int, reason: str) -> None:
            pass

    async def cases() -> set[Status]:
        seen: set[Status] = set()
        for _ in range(number):
            run = _Execution(Ended(), Job("1"), Limits(output_bytes=200))  # type: ignore[arg-type]
            out, err, report = run._outputs.theirs
            os.write(out, rng.randbytes(rng.randrange(300)))
            os.write(err, rng.choice([b"", b"\xff\x00\x1b[0m", "é".encode()[:1], rng.randbytes(20)]))
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                head = rng.choice([b"0=", b"0", b"1", b"M", b"I", b"F1", b"", b"\xff"])
                os.write(report, (head + rng.randbytes(rng.randrange(50))) or b"0")
            status = rng.choice([0, 256, 9, 11, 0x7F00])
            reason = rng.choice(["", "", "timeout", "memory", "violation", "output"])
            run._outputs.release()
            run._outputs.read_report()
            run._outputs.read_report()
            told = {"status": status, "reason": reason, "ready": True, "cpu": 0.0, "seconds": 0.1}
            result = run._conclude(told)
            run.close()
            assert isinstance(result, Result)
            assert clean(result.stdout.encode()) == result.stdout
            assert result.value == "" or result.status is Status.OK
            seen.add(result.status)
        return seen

    assert asyncio.run(elsewhere(cases())) == set(Status)


def test_what_the_code_claims_never_outweighs_what_was_seen() -> None:
    for claim in (b"0=1", b"M", b"", b"\xff"):
        assert end_status("timeout", -9, claim, excess=False, spent=False) is Status.TIMEOUT
        assert end_status("memory", -9, claim, excess=False, spent=False) is Status.MEMORY
        assert end_status("violation", -9, claim, excess=False, spent=False) is Status.KILLED
        assert end_status("", -11, claim, excess=False, spent=True) is Status.KILLED
        assert end_status("", -9, claim, excess=False, spent=True) is Status.TIMEOUT
        assert end_status("", 0, claim, excess=True, spent=False) is Status.OUTPUT_LIMIT
    assert end_status("", 1, b"0=1", excess=False, spent=False) is Status.ERROR


# ---- layout


def test_carving_covers_everything_but_what_is_hidden(tmp_path: Path) -> None:
    for name in ("lib/a.py", "lib/deep/b.py", "lib/deep/site-packages/secret.py", "lib/other/c.py", "data/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    hidden = str(tmp_path / "lib" / "deep" / "site-packages")
    read, listed = carve([str(tmp_path / "lib")], [hidden])
    assert set(read) == {str(tmp_path / "lib" / name) for name in ("a.py", "other", "deep/b.py")}
    assert set(listed) == {str(tmp_path / "lib"), str(tmp_path / "lib" / "deep")}
    assert carve([hidden], [hidden]) == ([], [])


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.UID, Tier.LANDLOCK])
def test_the_harness_is_in_no_tiers_view(tier: Tier, tmp_path: Path) -> None:
    config = describe(Profile(preload=("numpy",)), tier, most=1, folder=str(tmp_path), tree=None)
    paths = [pair[0] for pair in config["binds"]] if tier is Tier.FULL else config["rules"]["read"]
    masks = config["masks"] if tier is Tier.FULL else []
    for guarded in (Path(surefoot.__file__).parent, Path(sys.prefix), Path(pytest.__file__), Path.cwd()):
        for path in map(Path, paths):
            covered = guarded == path or path in guarded.parents
            assert not covered or any(Path(mask) in (guarded, *guarded.parents) for mask in masks), path
    assert any(path.endswith("/numpy") for path in paths)


def test_the_environment_of_the_harness_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert "SECRET_TOKEN" not in environment()
    assert "HOME" not in environment()


def test_a_network_or_a_tree_is_refused_where_it_cannot_be_bounded(tmp_path: Path) -> None:
    from surefoot.core.errors import ConfigError

    with pytest.raises(ConfigError, match="needs tier 'full'"):
        describe(Profile(network="loopback"), Tier.LANDLOCK, most=1, folder=str(tmp_path), tree=None)
    assert describe(BARE, Tier.LANDLOCK, most=1, folder=str(tmp_path), tree=None)["tier"] == "landlock"
