"""The listed cases (tests/data/resharding_cases.json, project data): counts, bounds, published figures, and ours."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.resharding import ReshardError, check_transfers, plan_fluid_seconds, plan_reshard
from meshwright.resharding.cases import read_case, read_cases, report
from meshwright.resharding.published import published_fluid_seconds, published_seconds

CASES = Path(__file__).parents[1] / "data" / "resharding_cases.json"
LISTED = {data["id"]: data for data in json.loads(CASES.read_text())["cases"]}
READ = {case.name: case for case in read_cases(CASES)}
# Cases whose senders have no slack for a copy per receiver, so that data is relayed.
RELAYED = {"C07", "C09", "C16"}


def unit_seconds(name: str) -> Fraction:
    """T: the tensor's bytes at the rate of one NIC."""
    return Fraction(READ[name].move.bytes, LISTED[name]["nic_Bps"])


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_case_has_its_unit_tasks_and_its_bound(name):
    plan = plan_reshard(READ[name].network, [READ[name].move])
    assert plan.demand.unit_tasks == LISTED[name]["unit_tasks"]
    assert plan.bound.seconds == Fraction(LISTED[name]["lower_bound_T"]) * unit_seconds(name)


@pytest.mark.parametrize("name", LISTED)
def test_our_plan_is_at_the_bound_or_a_64th_above(name):
    plan = plan_reshard(READ[name].network, [READ[name].move])
    check_transfers(plan)
    assert plan.bytes_between_domains == plan.demand.needed_bytes
    if name in RELAYED:
        assert plan.bound.seconds < plan.seconds <= plan.bound.seconds * Fraction(65, 64)
        assert plan.chunks >= 64
    else:
        assert plan.seconds == plan.bound.seconds
        assert plan.chunks == 1


@pytest.mark.parametrize("name", [name for name, data in LISTED.items() if "best_published_T" in data])
def test_published_algorithms_reach_their_published_figures(name):
    case = READ[name]
    plan = plan_reshard(case.network, [case.move])
    seconds = published_seconds(plan.demand)
    assert min(seconds.values()) == Fraction(LISTED[name]["best_published_T"]) * unit_seconds(name)
    assert seconds["send_recv"] == Fraction(LISTED[name]["send_recv_T"]) * unit_seconds(name)
    # The published broadcast is priced without the first chunk of its pipeline; ours is priced with it.
    assert plan.seconds <= min(seconds.values()) * (1 + Fraction(1, 64) * (name in RELAYED))


@pytest.mark.parametrize("name", ["C03", "C12", "C14", "C18"])
def test_fair_sharing_never_helps_a_plan_and_never_beats_the_bound(name):
    plan = plan_reshard(READ[name].network, [READ[name].move])
    bound = float(plan.bound.seconds)
    assert plan_fluid_seconds(plan) == pytest.approx(float(plan.seconds), rel=1e-12)
    assert all(seconds >= bound * (1 - 1e-9) for seconds in published_fluid_seconds(plan.demand).values())


def test_the_same_case_gives_the_same_plan():
    for name in ("C06", "C09"):
        first, second = (plan_reshard(READ[name].network, [READ[name].move]) for _ in range(2))
        assert first.fingerprint == second.fingerprint
    other = plan_reshard(READ["C07"].network, [READ["C07"].move])
    assert other.fingerprint != first.fingerprint


def test_report_has_the_promised_fields():
    found = report(READ["C14"])
    assert found["id"] == "C14"
    assert found["bytes_between_hosts"] == READ["C14"].move.bytes
    assert found["max_nic_bytes_in"] == READ["C14"].move.bytes
    assert found["max_nic_bytes_out"] == READ["C14"].move.bytes // 2
    assert found["planning_seconds"] > 0
    assert found["rounds"] == 1


def test_command_prints_one_json_object(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [LISTED["C01"], LISTED["C12"]]}))
    result = CliRunner().invoke(app, ["reshard", "--cases", str(path), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)["cases"]
    assert [entry["id"] for entry in found] == ["C01", "C12"]
    assert found[1]["ours_seconds"] == pytest.approx(found[1]["lower_bound_seconds"])


def test_command_prints_a_table(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [LISTED["C12"]]}))
    result = CliRunner().invoke(app, ["reshard", "--cases", str(path)])
    assert result.exit_code == 0
    assert "C12" in result.stdout
    assert "53.7 ms" in result.stdout


def changed(**fields) -> dict:
    return {**LISTED["C01"], **fields}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(src_spec=[["z"], [], []]), "unknown axis 'z'"),
        (changed(dst_spec=[["a"], ["a"], []]), "axis 'a' twice"),
        (changed(dst_spec=[[], [], [], ["a"]]), "at most 3 dims"),
        (changed(src={**LISTED["C01"]["src"], "shape": [2]}), "as many names as extents"),
        (changed(src={**LISTED["C01"]["src"], "dev": [0, 1]}), "8 different devices"),
        (changed(src={**LISTED["C01"]["src"], "per_host": 0}), "at least one device a host"),
        (changed(dst={**LISTED["C01"]["dst"], "first": 0, "per_host": 2}), "one size of the hosts"),
        (changed(nic_Bps=0), "bytes/s > 0"),
        (changed(nic_scale={"1": -1}), "bytes/s > 0"),
        (changed(core_nics=0), "bytes/s > 0"),
        (changed(item=0), "at least one byte"),
        (changed(shape="wide"), "numbers and lists"),
        (changed(shape=[8.7, 8, 8]), "8.7, no whole number"),
        (changed(item=True), "True, no whole number"),
        (changed(shape=[2**40, 2**40, 1]), "no more than a pebibyte"),
        (changed(nic_Bps=float("inf")), "cannot convert Infinity"),
        (changed(nic_Bps="1/0"), "Fraction(1, 0)"),
        (changed(nic_scale={"99": 2}), "one for host 99"),
        (changed(nic_scale=[1, 2]), "no attribute 'items'"),
        (changed(src_spec=[None, [], []]), "not iterable"),
        (changed(src={**LISTED["C01"]["src"], "first": -2}), "device ids from 0"),
        (changed(src={**LISTED["C01"]["src"], "dev": [2**70, *range(7)]}), "device ids from 0"),
        ({"id": "C01"}, "no 'src'"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(data, said, tmp_path):
    with pytest.raises(ReshardError, match="refused") as caught:
        read_case(data)
    assert said in str(caught.value)
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [data]}))
    result = CliRunner().invoke(app, ["reshard", "--cases", str(path)])
    assert result.exit_code == 2
    assert f"{path}, case C01" in result.stderr


@pytest.mark.parametrize("text", ["", "[1]", '{"moves": []}', '{"cases": []}'])
def test_a_file_without_cases_is_refused(text, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(ReshardError, match="refused the cases"):
        read_cases(path)


def test_meshes_on_hosts_of_different_size_do_not_share_them():
    data = changed(dst={**LISTED["C01"]["dst"], "first": 8, "per_host": 8})
    network = read_case(data).network
    assert sorted(len(host.devices) for host in network.hosts) == [4, 4, 8]


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "resharding.md").read_text()
    example = page.split("## Planning by itself")[1].split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(example, names)
    assert names["plan"].seconds == names["plan"].bound.seconds
