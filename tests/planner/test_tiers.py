"""Plans with model states in lower tiers: the time of a step, the space in the tiers, and the selection of such
plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roomier.plan import OffloadPlan, Plan, plan_from_flags
from roomier.planner.choosing.candidates import candidates
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.nearest import no_plan_fits
from roomier.planner.choosing.pricing import ClosedForms
from roomier.planner.forecast import Forecast, StepTime, Traffic
from roomier.planner.formula.offloaded import MovedUnit, Offloaded
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.timing.step_time import Durations, added_s, transfer_s
from tests.planner.made_up_prices import KIB, FixedPrices, auto, forecast, gpus, language, regression

GIB = 2**30
LINK = Link(1 * GIB)
STEP = Durations(first_forward_s=1.0, forward_s=1.0, backward_s=2.0, update_s=0.5)


def machine(kind: str = "cpu", devices: int = 1, **more: Any) -> Machine:
    device = Device("any", kind, 80 * GIB, {"fp32": 1e12}, 1e12)
    return Machine(device, devices, 1, LINK, LINK, LINK, Link(2 * GIB), LINK, 100 * GIB, "", **more)


def away(mode: str, gib: int, tier: str = "disk", **more: Any) -> Offloaded:
    """Return the states of 64 units, which have ``gib`` GiB in total."""
    size = gib * GIB // 64
    unit = MovedUnit("block", size, size, size, 0)
    return Offloaded((unit,) * 64, state_tier=tier, mode=mode, **more)


@pytest.mark.parametrize(
    ("mode", "gib", "seconds"),
    [
        ("plain", 0, 0.0),
        ("plain", 4, 6 * (1 - OffloadPlan.buffers / 64 / 2) - 0.5),  # 2 s of reads and 4 s of writes
        ("deferred", 4, 6 * (1 - OffloadPlan.buffers / 64 / 2) - 1.5),
        ("speculative", 4, 6 - 3.5),
        ("deferred", 1, 0.0),
        ("speculative", 2, 0.0),
    ],
)
def test_transfers_that_exceed_the_window_of_a_mode_add_time(mode: str, gib: int, seconds: float) -> None:
    assert added_s(away(mode, gib), machine(), STEP) == pytest.approx(seconds)


@pytest.mark.parametrize("mode", ["plain", "deferred", "speculative"])
def test_updates_with_one_buffer_wait_for_all_transfers(mode: str) -> None:
    assert added_s(away(mode, 4, num_state_buffers=1), machine(), STEP) == pytest.approx(6.0)


def test_a_link_transfers_in_both_directions_and_ranks_share_a_disk() -> None:
    traffic = Traffic(to_device_bytes=2 * GIB, to_host_bytes=3 * GIB)
    assert transfer_s(traffic, machine("cuda")) == pytest.approx(3.0)
    traffic = replace(traffic, disk_read_bytes=2 * GIB, disk_written_bytes=3 * GIB)
    assert transfer_s(traffic, machine("cuda")) == pytest.approx(4.0)
    assert transfer_s(traffic, machine("cuda", devices=2)) == pytest.approx(8.0)


def test_parameters_are_transferred_during_forward_and_backward() -> None:
    unit = MovedUnit("block", GIB, GIB, GIB, GIB)
    moved = Offloaded(parameters=(unit,) * 4, parameter_tier="cpu", on_cpu=False)
    # Forward reads 4 GiB in 4 s. Backward reads and writes 4 GiB. The update reads 8 GiB and writes 4 GiB.
    assert added_s(moved, machine("cuda"), STEP) == pytest.approx(3 + 2 + 8 / 2 - 0.5)


def test_offloaded_data_fits_in_the_host_memory_and_on_the_disk_of_a_node() -> None:
    def full(devices: int = 1, **sizes: int) -> str:
        found = forecast(plan_from_flags(), 1, KIB, 10.0)
        return replace(found, machine=machine(devices=devices, disk_free_bytes=100 * GIB), **sizes).full_tier

    assert full(host_bytes=80 * GIB) == ""
    assert full(host_bytes=81 * GIB) == "host memory"
    assert full(devices=2, host_bytes=41 * GIB) == "host memory"
    assert full(disk_bytes=95 * GIB) == ""
    assert full(disk_bytes=96 * GIB) == "disk"
    unknown = replace(forecast(plan_from_flags(), 1, KIB, 10.0), machine=machine(), disk_bytes=10**18)
    assert unknown.full_tier == ""


def test_bytes_that_are_written_per_day() -> None:
    found = forecast(plan_from_flags(), 1, KIB, 10.0)
    assert replace(found, traffic=Traffic(disk_written_bytes=7)).written_bytes_per_day == 7 * 8640
    assert replace(found, traffic=Traffic(disk_written_bytes=7), time=None).written_bytes_per_day is None


# ---- the choice of a plan --------------------------------------------------------------------------------------------


def tiers_of(plan: Plan) -> tuple[str, str]:
    return plan.offload.optimizer_states, plan.offload.parameters


def test_candidates_with_slow_tiers_are_a_last_resort() -> None:
    def found(devices: int, machine: Machine, **more: Any) -> set[tuple[str, str]]:
        plan = auto(devices=devices, accelerator="auto")
        return {tiers_of(each.plan) for each in candidates(language(), plan, machine, **more) if not each.reason}

    assert found(1, machine()) == {("none", "none")}
    assert found(2, gpus()) == {("none", "none"), ("cpu", "none")}
    assert found(1, machine(), is_last_resort=True) == {("disk", "none"), ("disk", "disk")}
    both = {(one, other) for one in ("cpu", "disk") for other in ("cpu", "disk")}
    assert found(2, gpus(), is_last_resort=True) == {("none", "none"), ("disk", "none"), *both}
    named = candidates(language(), plan_from_flags(), machine(), is_last_resort=True)
    assert named == ()


def test_candidates_with_few_buffers_are_a_last_resort() -> None:
    def found(**more: Any) -> set[tuple[str, str, int]]:
        options = ((each.plan, each.reason) for each in candidates(language(), auto(devices=2), machine(), **more))
        return {
            (plan.parallel.strategy, plan.parallel.communication, plan.offload.buffers)
            for plan, refusal in options
            if not refusal
        }

    assert {options[1:] for options in found()} == {("overlapped", 3)}
    everything = found(is_last_resort=True)
    assert {options[:2] for options in everything if options[1] == "sequential"} == {("zero3", "sequential")}
    assert {options[2] for options in everything} == {3, 1}
    # Plans without a slow option were evaluated before.
    plans = [each.plan for each in candidates(language(), auto(devices=2), machine(), is_last_resort=True)]
    assert all(each.parallel.communication == "sequential" or tiers_of(each)[0] == "disk" for each in plans)


@pytest.mark.more
def test_sequential_communication_is_chosen_before_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roomier.planner.choosing.choose._MOST_STAGES", 1)  # stages would fit without it
    two_ranks, plan = machine(devices=2), auto(devices=2)
    prices = ClosedForms(language(1), two_ranks)
    possible = [each for each in candidates(language(1), plan, two_ranks) if not each.reason]
    smallest = min(prices.estimate(each.plan, each.micro_batch).peak_bytes for each in possible)
    choice = choose(language(1), plan, two_ranks, budget_bytes=smallest - 1, prices=prices)
    assert choice.chosen is not None
    assert choice.chosen.plan.parallel.communication == "sequential"
    assert tiers_of(choice.chosen.plan) == ("none", "none")
    assert choice.chosen.peak_bytes < smallest
    assert "sequential communication" in choice.why


class TierPrices(FixedPrices):
    """Prices of 3 KiB for resident plans, 2 KiB for offloaded states, and 1 KiB for offloaded parameters."""

    def __init__(self, seconds: dict[str, float], disk_bytes: int = 5 * KIB) -> None:
        super().__init__(self._price)
        self._seconds, self._disk_bytes = seconds, disk_bytes

    def _price(self, plan: Plan, micro_batch: int) -> tuple[int, float]:
        num_moved = sum(tier != "none" for tier in tiers_of(plan))
        seconds = 1.0 if plan.activation.policy == "none" else 2.0
        return (3 - num_moved) * KIB - (plan.activation.policy != "none"), seconds + self._seconds[tiers_of(plan)[0]]

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        found = super().estimate(plan, micro_batch)
        is_on_disk = "disk" in tiers_of(plan)
        return replace(
            found,
            machine=machine(disk_free_bytes=10 * KIB),
            method="dry run",
            disk_bytes=self._disk_bytes if is_on_disk else 0,
            traffic=Traffic(disk_written_bytes=KIB if is_on_disk else 0),
        )


@pytest.mark.parametrize(
    ("budget_kib", "tiers", "reason"),
    [
        (3, ("none", "none"), "the fastest plan"),
        (2, ("disk", "none"), "because no plan that keeps model states on the device fits"),
        (1, ("disk", "disk"), "5.0 KiB on disk, 7.0 MiB written per day, because no plan"),
    ],
)
def test_a_disk_is_chosen_if_no_other_plan_fits(budget_kib: int, tiers: tuple[str, str], reason: str) -> None:
    prices = TierPrices({"none": 0.0, "disk": 11.0})
    choice = choose(language(1), auto(), machine(), budget_bytes=budget_kib * KIB, prices=prices)
    assert choice.chosen is not None
    assert tiers_of(choice.chosen.plan) == tiers
    assert reason in choice.why


def test_states_in_host_memory_are_chosen_if_they_are_faster() -> None:
    plan = auto(accelerator="auto", devices=2)
    for seconds, tier in ((0.5, "cpu"), (1.5, "none")):
        prices = TierPrices({"none": 0.0, "cpu": seconds})
        choice = choose(language(1), plan, gpus(), budget_bytes=3 * KIB - 1, prices=prices)
        assert choice.chosen is not None
        assert choice.chosen.plan.offload.optimizer_states == tier
        is_explained = "faster than all plans that keep model states on the device" in choice.why
        assert is_explained == (tier == "cpu")


def test_a_plan_that_exceeds_the_disk_is_not_chosen() -> None:
    prices = TierPrices({"none": 0.0, "disk": 1.0}, disk_bytes=11 * KIB)
    choice = choose(language(1), auto(), machine(), budget_bytes=2 * KIB, prices=prices)
    assert choice.chosen is None
    assert any("offloads more than fits in the disk of a node" in each.reason for each in choice.considered)
    error = str(no_plan_fits(language(1), auto(), choice, prices=prices))
    assert "needs 3.0 KiB on each rank" in error  # the error suggests no plan whose offloaded data does not fit


def test_a_model_without_blocks_keeps_its_parameters() -> None:
    found = candidates(regression(), auto(), machine(), is_last_resort=True)
    assert {tiers_of(each.plan) for each in found} == {("disk", "none")}


def test_step_times_contain_the_added_time() -> None:
    assert StepTime(1.0, offload_s=0.5, update_s=0.25).total_s == 1.75
