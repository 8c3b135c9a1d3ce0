"""The generators of a run as child processes: started when the learner is ready, restarted when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headway.config import RunConfig, RunFolder
from headway.errors import EXIT_USER_ERROR, RunFailed
from headway.launch.child import Child, Echo
from headway.launch.program import generator_command
from headway.launch.restarts import Restarts
from headway.launch.surroundings import child_environment


class Fleet:
    """All generators. Owned by the supervisor's thread."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        program: Sequence[str],
        note: Callable[[str], None],
        echo: Echo | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._program = program
        self._note = note
        self._echo = echo
        self._endpoints = ""
        self._children: dict[int, Child] = {}
        self._restarts = [Restarts(config.stream.max_restarts) for _ in range(config.generator.replicas)]

    def start(self, endpoints: str) -> None:
        """Starts every generator.

        Args:
            endpoints: where the learner listens.
        """
        self._endpoints = endpoints
        for index in range(self._config.generator.replicas):
            self._launch(index)

    def children(self) -> list[Child]:
        """Those that were started last, ended ones included."""
        return list(self._children.values())

    def check(self, restart: bool = True) -> None:
        """Notices ends and starts again what is due.

        Args:
            restart: False while the run ends, when generators leave because they were told to.

        Raises:
            RunFailed: a generator ended for good.
        """
        if not restart:
            return
        for index, child in list(self._children.items()):
            # One that has not joined yet is in no list of the learner's, so nobody else would miss it.
            if child.is_frozen(self._config.stream.heartbeat_s):
                self.lost(index, child.pid, "frozen by a signal (SIGSTOP)")
            if child.poll() is not None:
                del self._children[index]
                self._ended(index, child)
        for index, restarts in enumerate(self._restarts):
            if restarts.due(time.monotonic()):
                self._launch(index)

    def lost(self, index: int, pid: int, why: str) -> None:
        """The learner gave a generator up: a frozen one is killed, so that `check` starts it again.

        The notice may come long after the process had ended and was replaced, since the learner passes news
        on between two steps; the process that took its place is left alone.
        """
        child = self._children.get(index)
        if child is None or child.pid != pid:
            return
        if child.poll() is None:
            self._note(f"{child.name} (pid {child.pid}) is given up and killed: {why or 'no heartbeat'}")
            child.kill()

    def _launch(self, index: int) -> None:
        self._children[index] = Child(
            f"generator-{index}",
            generator_command(self._program, self._folder.path, self._endpoints, index),
            child_environment(self._config, "generator", index),
            self._folder.logs / f"generator-{index}.log",
            self._echo,
        )

    def _ended(self, index: int, child: Child) -> None:
        child.close()
        if child.poll() == EXIT_USER_ERROR:
            raise RunFailed(child.ending())
        restarts = self._restarts[index]
        if not restarts.ended(time.monotonic()):
            raise RunFailed(f"after {restarts.most} restarts (stream.max_restarts), {child.ending()}")
        self._note(f"{child.fate()}; see {child.log}; restart {restarts.count} of at most {restarts.most}")
