"""A shell as a tool: commands of the policy run in one sandbox session, in a folder that stays.

Must not know how commands are held; that is the sandbox's business.
"""

from __future__ import annotations

from surefoot.tools.base import Tool, make_tool
from surefoot.tools.python import PythonSession

# At the deadline the whole group of processes is ended, not only the shell.
_RUN = """
def _run(command):
    import os, signal, subprocess, sys
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGKILL)
        raise SystemExit(child.wait())
    if code:
        sys.stderr.write(f"exit code {{code}}")
        raise SystemExit(code)
_run({command!r})
"""


class ShellSession(PythonSession):
    """A shell for one episode: files stay from command to command, variables and ``cd`` do not.

    Takes the arguments of :class:`PythonSession`. Needs a tier in which code may start processes.
    """

    def tools(self) -> tuple[Tool, ...]:
        """The tool ``shell(command)`` of this session."""
        return (self.bounded(make_tool(self.shell)),)

    async def shell(self, command: str) -> str:
        """Run a command of the shell; what it writes comes back. Files are kept, variables are not."""
        return await self.run(_RUN.format(command=command))
