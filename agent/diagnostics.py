"""The commands that look at the machine: ``diag.nvml``, ``diag.host`` and ``diag.echo``.

``diag.nvml`` compares the GPUs with the accepted ones, if its arguments name them:
``{"expected": [GpuFacts, …]}`` in JSON. Its output is a `Diagnosis` in JSON, and the command succeeds
only if every check passed. ``diag.host`` gives the host's facts and the driver's. ``diag.echo`` gives its
arguments back, for measuring the way there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.commands import BadArguments, Handler
from agent.statements import Outcome
from shared.inventory import GPUS_MAX, CheckResult, Diagnosis, DriverFacts, GpuFacts, HostFacts
from shared.wire import COMMAND_OUTPUT_BYTES_MAX

if TYPE_CHECKING:
    from agent.drivers.base import DeviceDriver

CHECKS_FAILED = "CHECKS_FAILED"
# Of a diagnosis that is too large as it is: the sentence about each check is cut.
SHORT_DETAIL_CHARS = 80


class DiagnoseArguments(msgspec.Struct, frozen=True, kw_only=True):
    """`expected` are the accepted GPUs; none before the first acceptance."""

    expected: tuple[GpuFacts, ...] = ()


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``diag.host``."""

    host: HostFacts
    driver: DriverFacts


def make_handlers(devices: DeviceDriver) -> dict[str, Handler]:
    """Return the handlers by kind."""

    async def diagnose_nvml(arguments: bytes, /) -> Outcome:
        try:
            asked = msgspec.json.decode(arguments or b"{}", type=DiagnoseArguments)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadArguments(str(exc)) from exc
        if len(asked.expected) > GPUS_MAX:
            raise BadArguments(f"expected: more than {GPUS_MAX} GPUs")
        diagnosis = Diagnosis(checks=tuple(await devices.diagnose(asked.expected)))
        return _describe(diagnosis)

    async def diagnose_host(_arguments: bytes, /) -> Outcome:
        inventory = await devices.probe()
        return Outcome(output=msgspec.json.encode(HostReport(host=inventory.host, driver=inventory.driver)))

    async def echo(arguments: bytes, /) -> Outcome:
        return Outcome(output=arguments)

    return {"diag.nvml": diagnose_nvml, "diag.host": diagnose_host, "diag.echo": echo}


def _describe(diagnosis: Diagnosis) -> Outcome:
    output = msgspec.json.encode(diagnosis)
    if len(output) > COMMAND_OUTPUT_BYTES_MAX:
        output = msgspec.json.encode(Diagnosis(checks=tuple(_shorten(check) for check in diagnosis.checks)))
    failed = [check for check in diagnosis.checks if not check.ok]
    passed = f"{len(diagnosis.checks) - len(failed)}/{len(diagnosis.checks)} checks passed"
    if not failed:
        return Outcome(detail=passed, output=output)
    detail = "; ".join([passed, *(f"{check.name}: {check.detail}" for check in failed)])
    return Outcome(state="failed", code=CHECKS_FAILED, detail=detail, output=output)


def _shorten(check: CheckResult) -> CheckResult:
    return CheckResult(name=check.name, ok=check.ok, detail=check.detail[:SHORT_DETAIL_CHARS])
