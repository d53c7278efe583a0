"""The checks of the doctor, in the order in which they are done."""

from __future__ import annotations

from typing import Literal, NamedTuple

Needs = Literal["", "torch", "device"]


class Check(NamedTuple):
    """One check. target: "module:function" of a Context, which gives Findings. limit_s: after it, it hangs."""

    target: str
    limit_s: float
    needs: Needs = ""


CHECKS: dict[str, Check] = {
    "system": Check("difftrain.cli.doctor.system:check", 30),
    "packages": Check("difftrain.cli.doctor.packages:check", 30),
    "installation": Check("difftrain.device.health.install:check", 30),
    "variables": Check("difftrain.device.health.variables:check", 30),
    "launch": Check("difftrain.cli.doctor.system:launch", 30),
    "folders": Check("difftrain.cli.doctor.folders:check", 60),
    "imports": Check("difftrain.cli.doctor.packages:imports", 180, "torch"),
    "devices": Check("difftrain.device.health.devices:check", 120, "torch"),
    "memory": Check("difftrain.device.health.devices:each", 120, "device"),
    "noise": Check("difftrain.cli.doctor.basics:noise", 60, "device"),
    "attention": Check("difftrain.device.health.numerics:attention", 180, "device"),
    "kernels": Check("difftrain.device.health.numerics:kernels", 180, "device"),
    "overflow": Check("difftrain.device.health.numerics:overflow", 60, "device"),
    "precision": Check("difftrain.device.health.numerics:precision", 60, "device"),
    "compiler": Check("difftrain.cli.doctor.basics:compiler", 60, "device"),
    "speed": Check("difftrain.cli.doctor.basics:speed", 120, "device"),
    "collective": Check("difftrain.cli.doctor.collective:check", 180, "device"),
}
DEVICES = "devices"  # where it is wrong, checks that need a device are left out
QUICK_LEAVES_OUT = ("speed", "collective")
