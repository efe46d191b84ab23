from my_code import Classifier, Points

from roomier.core.units import format_bytes
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload

machine = machine_of("a100-40gb:2")
workload = Workload.of(Classifier(), next(iter(Points().train_dataloader())))
plan = plan_from_flags(strategy="zero2", devices=2, accelerator="cuda")
forecast = confirm(workload, plan, machine)
print(f"Peak: {format_bytes(forecast.peak_bytes)}, in {forecast.peak.phase} {forecast.peak.place}")
for kind, num_bytes in {**forecast.bytes_by_kind, **forecast.fixed_bytes}.items():
    print(f"{kind}: {format_bytes(num_bytes)}")
assert forecast.fits(machine.device.memory_bytes)
