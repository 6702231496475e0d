"""Real GPUs: a `DeviceDriver` that asks NVML in a child process.

One child at a time, started when it is first needed and kept, because initialising NVML takes
seconds on a node without the persistence daemon. Every call has a deadline; a child that misses
it, dies or talks nonsense is killed, and the next call starts another. So one GPU that hangs costs
its own answer and a restart, and the others are still read. A driver-level failure ends the child
too: after an upgrade only a new process maps the new library.

A child stuck in the kernel survives SIGKILL for a while. Such children are waited for in the
background, and while `STUCK_CHILDREN_MAX` of them are left no new one is started: the driver is
``hung``, and piling up processes on it helps nobody.

"No driver" is a state in the answer, not an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from agent.drivers.base import DeviceUnavailable, GpuProcess
from agent.drivers.checks import check_node
from agent.drivers.host import HostPaths, find_missing_nodes, list_pci_gpus, read_host_facts
from agent.drivers.nvml_messages import (
    LINE_BYTES_MAX,
    Answer,
    Failure,
    GpuAnswer,
    ProcessesAnswer,
    ReadGpu,
    ReadProcesses,
    ReadSystem,
    SystemAnswer,
)
from shared.inventory import GPUS_MAX, DriverFacts, GpuFault, HealthFacts, Inventory
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from agent.drivers.nvml_messages import Request
    from shared.inventory import CheckResult, DriverState, GpuFacts, GpuHealth, HostFacts

_log = structlog.get_logger()

HUNG = "HUNG"
CRASHED = "CRASHED"
STUCK_CHILDREN_MAX = 2  # one may be a transient; two in a row are a driver that needs a reboot
REAP_S = 2.0  # for a killed process to go; one that is stuck in the kernel is left to init
PLACE_WAIT_S = 2.0  # a child that is merely slow to die is reaped in milliseconds
READ_BYTES = 64 * 1024  # one pipe buffer
DRIVER_STATES: Mapping[str, DriverState] = {
    "LIBRARY_NOT_FOUND": "absent",
    "DRIVER_NOT_LOADED": "not_loaded",
    "LIB_RM_VERSION_MISMATCH": "reboot_needed",
    HUNG: "hung",
}
DETAIL_CHARS_MAX = 256  # what an inventory takes; libraries can be wordy

_encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class NvmlConfig:
    """How to run the child.

    Attributes:
        python: the interpreter; the agent's own, so that it finds the same packages.
        environment: added to the agent's own; ``LD_LIBRARY_PATH`` chooses another library.
        paths: where /sys, /proc and /dev are.
        start_s: seconds to start the child and initialise NVML; eight GPUs without the
            persistence daemon take most of a minute.
        call_s: seconds for one call about one GPU.
    """

    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    paths: HostPaths = field(default_factory=HostPaths)
    start_s: float = 120.0
    call_s: float = 10.0


@asynccontextmanager
async def open_nvml(config: NvmlConfig) -> AsyncGenerator[NvmlDriver]:
    """Open the driver; the child is started by the first call and gone when the block is left."""
    async with service_nursery() as nursery:
        driver = NvmlDriver(config, nursery)
        try:
            yield driver
        finally:
            with trio.move_on_after(REAP_S, shield=True):
                await driver.stop()


class _ChildFailedError(Exception):
    """The child died, or what it sent is no answer."""


class NvmlDriver:
    """Reads one machine's GPUs; calls queue for the one child. Made by `open_nvml`."""

    def __init__(self, config: NvmlConfig, reapers: trio.Nursery) -> None:
        self._config = config
        self._reapers = reapers
        self._turn = trio.Lock()
        self._child: trio.Process | None = None
        self._unread = bytearray()
        self._places = trio.Semaphore(1 + STUCK_CHILDREN_MAX)

    async def probe(self) -> Inventory:
        host = read_host_facts(self._config.paths)
        pci_gpus = list_pci_gpus(self._config.paths)[:GPUS_MAX]
        async with self._turn:
            system = await self._call(ReadSystem())
            if not isinstance(system, SystemAnswer):
                self.discard_child()
                return Inventory(host=host, driver=_driver_facts(system, pci_gpus))
            answers = await self._read_gpus(min(system.gpu_count, GPUS_MAX))
        driver = DriverFacts(
            state="ok",
            version=system.driver_version,
            nvml_version=system.nvml_version,
            cuda_version=system.cuda_version,
            pci_gpus=pci_gpus,
        )
        return _assemble(host=host, driver=driver, answers=answers)

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        inventory = await self.probe()
        minors = [gpu.minor for gpu in inventory.gpus if gpu.minor is not None]
        missing = find_missing_nodes(self._config.paths, minors) if inventory.gpus else ()
        return check_node(inventory, missing_nodes=missing, expected=expected)

    async def processes(self, uuid: str) -> list[GpuProcess]:
        async with self._turn:
            answer = await self._call(ReadProcesses(uuid))
        if isinstance(answer, ProcessesAnswer):
            return [GpuProcess(pid, used_mib) for pid, used_mib in answer.processes]
        failure = _as_failure(answer)
        raise DeviceUnavailable(uuid, failure.code, failure.detail)

    def discard_child(self) -> None:
        """Kill the child, if there is one, and leave it to be reaped in the background."""
        child, self._child = self._child, None
        self._unread.clear()
        if child is not None:
            child.kill()
            self._reapers.start_soon(self._reap, child)

    async def stop(self) -> None:
        """End the child and wait until it, and every one before it, is gone."""
        self.discard_child()
        for _ in range(1 + STUCK_CHILDREN_MAX):
            await self._places.acquire()

    async def _reap(self, child: trio.Process) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        await child.stdin.aclose()
        await child.stdout.aclose()
        await child.wait()
        self._places.release()

    async def _read_gpus(self, count: int) -> list[Answer]:
        answers: list[Answer] = []
        for index in range(count):
            if self._child is None:
                # The GPU before this one cost the child. Where another cannot be had, waiting as
                # long again for each of the remaining GPUs would tell nothing new.
                started = await self._start_child()
                if isinstance(started, Failure):
                    return [*answers, *[started] * (count - index)]
            answers.append(await self._call(ReadGpu(index)))
        return answers

    async def _call(self, request: Request) -> Answer:
        """Ask the child. No answer is a `Failure` too, and the child is discarded."""
        if self._child is None:
            started = await self._start_child()
            if isinstance(started, Failure) or isinstance(request, ReadSystem):
                return started
        return await self._exchange_within(self._config.call_s, request)

    async def _start_child(self) -> Answer:
        """Start a child and initialise NVML; what NVML says is the answer."""
        with trio.move_on_after(PLACE_WAIT_S) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            return Failure(HUNG, f"{STUCK_CHILDREN_MAX} processes are stuck in the driver; reboot the node")
        try:
            self._child = await trio.lowlevel.open_process(
                [self._config.python, "-P", "-m", "agent.drivers.nvml_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._config.environment},
            )
        except OSError as exc:
            return Failure(CRASHED, f"cannot start the NVML process: {exc}")
        finally:
            if self._child is None:
                self._places.release()
        answer = await self._exchange_within(self._config.start_s, ReadSystem())
        if isinstance(answer, Failure):
            self.discard_child()
        return answer

    async def _exchange_within(self, seconds: float, request: Request) -> Answer:
        try:
            with trio.move_on_after(seconds):
                return await self._exchange(request)
            failure = Failure(HUNG, f"no answer within {seconds:g} s")
        except _ChildFailedError as exc:
            failure = Failure(CRASHED, str(exc))
        except BaseException:
            # Cancelled in between: the answer that is still to come would be taken for the next one's.
            self.discard_child()
            raise
        _log.warning("nvml.child_failed", request=str(request), code=failure.code, detail=failure.detail)
        self.discard_child()
        return failure

    async def _exchange(self, request: Request) -> Answer:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            await child.stdin.send_all(_encode(request) + b"\n")
            while b"\n" not in self._unread:
                data = await child.stdout.receive_some(READ_BYTES)
                if not data:
                    raise _ChildFailedError("the NVML process ended during the call")
                self._unread += data
                if len(self._unread) > LINE_BYTES_MAX:
                    raise _ChildFailedError("the NVML process sent no end of line")
            line, _, rest = bytes(self._unread).partition(b"\n")
            self._unread[:] = rest
            return _decoder.decode(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise _ChildFailedError("the NVML process ended before the call") from exc
        except msgspec.DecodeError as exc:
            raise _ChildFailedError("the NVML process sent something that is no answer") from exc


def _as_failure(answer: Answer) -> Failure:
    if isinstance(answer, Failure):
        return answer
    return Failure(CRASHED, f"the NVML process answered with {type(answer).__name__}")


def _driver_facts(answer: Answer, pci_gpus: tuple[str, ...]) -> DriverFacts:
    failure = _as_failure(answer)
    return DriverFacts(
        state=DRIVER_STATES.get(failure.code, "failed"),
        detail=f"{failure.code}: {failure.detail}"[:DETAIL_CHARS_MAX],
        pci_gpus=pci_gpus,
    )


def _assemble(*, host: HostFacts, driver: DriverFacts, answers: Sequence[Answer]) -> Inventory:
    found: list[tuple[GpuFacts, GpuHealth]] = []
    faults: list[GpuFault] = []
    for index, answer in enumerate(answers):
        if isinstance(answer, GpuAnswer):
            found.append((answer.facts, answer.health))
        else:
            failure = _as_failure(answer)
            faults.append(GpuFault(index=index, code=failure.code, detail=failure.detail[:DETAIL_CHARS_MAX]))
    found.sort(key=lambda pair: pair[0].pci_bus_id)
    return Inventory(
        host=host,
        driver=driver,
        gpus=tuple(facts for facts, _ in found),
        health=HealthFacts(gpus=tuple(health for _, health in found), faults=tuple(faults)),
    )
