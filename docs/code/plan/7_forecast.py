from my_code import Classifier, Points
from rich.console import Console

from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.spec import machine_of
from roomier.planner.report.tables import forecast_table
from roomier.planner.workload import Workload

machine = machine_of("a100-40gb:2")
workload = Workload.of(Classifier(), next(iter(Points().train_dataloader())))
plan = plan_from_flags(strategy="zero2", devices=2, accelerator="cuda")
forecast = confirm(workload, plan, machine)
Console().print(forecast_table(forecast, machine.device.memory_bytes))
assert forecast.fits(machine.device.memory_bytes)
