"The runner: names, order, skips, crashes; and each check in a report"
import pytest
import torch
from planted import bad, small, statuses

from sft_nb.checks import preflight as evidence   # the module
from sft_nb.checks.core import CHECKS, GROUPS, all_checks, check, run_check
from sft_nb.checks.preflight import Evidence
from sft_nb.checks.preflight import preflight
from sft_nb.planning.plan import plan as make_plan
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench

IN_ORDER = [f"{group}.{name}" for group, names in {
    "environment": "versions device gpu writable disk tracking hub",
    "data": "prepared kept held_out near_duplicates row_lengths best_figure score masked ends bos ids pad prompts",
    "plan": "memory extent usual",
    "model": "trainable reach packed bits causal method formats vocabulary special_tokens",
    "batch": "shapes mask positions padding labels supervised",
    "step": "loss own_loss balance gradient measured order width evaluation derivative",
    "learning": "learns moves schedule saves answers"}.items() for name in names.split()]


@pytest.fixture(scope="module")
def data(): return prepare(small())


@pytest.fixture(scope="module")
def plan(data): return make_plan(small(), data)


def test_the_order_of_a_report():
    assert [name for name, _ in all_checks()] == IN_ORDER
    assert list(dict.fromkeys(name.split(".")[0] for name in IN_ORDER)) == list(GROUPS)


def test_a_group_that_is_not_there():
    with pytest.raises(ValueError, match="no group 'dta'"): check("dta")


def test_a_check_that_crashes_is_a_finding(data, plan, monkeypatch):
    def check_odd(data): raise ZeroDivisionError("by zero\nand more")
    monkeypatch.setitem(CHECKS, "data.odd", check_odd)
    report = preflight(small(), data=data, plan=plan)
    assert bad(report)["data.odd"].says == "the check itself crashed: ZeroDivisionError: by zero"
    assert report.exit_code == 1 and list(bad(report)) == ["data.odd"]


def test_a_check_that_asks_for_what_no_evidence_has(monkeypatch):
    def check_odd(nothing): "never reached"
    with pytest.raises(AttributeError, match="nothing"): run_check("data.odd", check_odd, Evidence(Workbench(small())))
    monkeypatch.setitem(CHECKS, "data.odd", check_odd)
    with pytest.raises(AttributeError, match="nothing"): preflight(small())


def test_evidence_that_fails_without_a_part_is_a_failure():
    class Odd:
        failures = {}
        @property
        def n(self): raise ZeroDivisionError("by zero")
    def check_odd(n): "never reached"
    found, = run_check("data.odd", check_odd, Odd())
    assert found.status == "fail" and "by zero" in found.says


def test_rows_that_cannot_be_read(tmp_path):
    report = preflight(small(train_file=str(tmp_path/"nothing.jsonl")))
    by = statuses(report)
    later = {s for name, s in by.items() if name.split(".")[0] in ("plan", "model", "batch", "step", "learning")}
    assert by["data"] == "fail" and later == {"skipped"} and by["environment.versions"] == "ok"
    assert sum(f.status == "fail" for f in report.findings) == 1


def test_a_model_that_cannot_be_loaded(data, plan, monkeypatch):
    def broken(cfg, tokenizer): raise OSError("truncated")
    monkeypatch.setattr("sft_nb.workbench.load_model", broken)
    by = {f.check: f for f in preflight(small(), data=data, plan=plan).findings}
    assert by["model"].says == "it could not be created: OSError: truncated" and by["step.loss"].status == "skipped"
    assert by["data.prompts"].status == by["plan.memory"].status == "ok"


def test_a_step_that_runs_out_of_memory(data, plan, monkeypatch):
    def out(*args, **kwargs): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr("sft_nb.checks.preflight.take_step", out)
    by = statuses(preflight(small(), data=data, plan=plan))
    assert by["first step"] == "fail" and by["step.gradient"] == "skipped" and by["step.derivative"] == "ok"


def test_a_source_tree_without_metadata_skips_the_versions(monkeypatch):
    def missing(name): raise evidence.PackageNotFoundError(name)
    monkeypatch.setattr(evidence, "requires", missing)
    assert Evidence(Workbench(small())).requirements is None
