"What depends on arguments of the chat template: the day of a run, and a switch of its own name for reasoning"
import re
from datetime import date

import pytest
from served import assert_named, FEW, TEMPLATE, trained
from stub_server import listening, Stub

from sft_nb.base.report import ConfigError
from sft_nb.proof import prove as proving   # the module

DATED = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}")
DATED = DATED.replace("enable_thinking is defined and enable_thinking", "thinking is defined and thinking")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("dated"), chat_template=DATED,
                   chat_template_kwargs="strftime_now=2025-03-09")


def proof_and_days(run, monkeypatch, **how):
    "A proof, and the days in the prompts of its reference"
    seen, answer = [], proving.answer_as_reference
    def watched(bench, *args, **more):
        seen.append((bench.tokenizer, answer(bench, *args, **more)))
        return seen[-1][1]
    monkeypatch.setattr(proving, "answer_as_reference", watched)
    proof = proving.prove(run.run, **FEW | how)
    days = {re.search("Today: (.*)", tok.decode(a.prompt))[1] for tok, found in seen for a in found.tuned}
    return proof, days, [s.finding.says for s in proof.stages if s.finding.check == "date"]


def test_a_folder_is_compared_by_the_day_of_the_run(run, monkeypatch):
    proof, days, says = proof_and_days(run, monkeypatch, folder=run.merged)
    assert proof.same and days == {"09 Mar 2025"} and not says, str(proof)


@pytest.mark.parametrize("api", ["vLLM", "llama.cpp", "plain"])
def test_a_server_with_a_clock_is_compared_by_its_own_day(run, monkeypatch, api):
    with listening(Stub(run.tuned, run.tokenizer, api=api, logprobs=api != "plain")) as url:
        proof, days, says = proof_and_days(run, monkeypatch, server=url)
    today = date.today()
    assert proof.same and days == {today.strftime("%d %b %Y")}, str(proof)
    assert says == [f"it writes the date of today, {today.isoformat()}; training had 2025-03-09"]


def test_a_server_that_writes_the_day_of_the_run_is_compared_by_it(run, monkeypatch):
    fixed = DATED.replace("strftime_now('%d %b %Y')", "'09 Mar 2025'")
    with listening(Stub(run.tuned, run.tokenizer, template=fixed)) as url:
        proof, days, says = proof_and_days(run, monkeypatch, server=url)
    assert proof.same and days == {"09 Mar 2025"} and not says, str(proof)


@pytest.mark.parametrize("api", ["vLLM", "plain"])
def test_the_fix_for_thinking_names_the_argument_of_this_template(run, monkeypatch, api):
    on = DATED.replace("thinking is defined and thinking", "thinking is not defined or thinking")
    with listening(Stub(run.tuned, run.tokenizer, api=api, template=on, logprobs=api != "plain")) as url:
        proof = proving.prove(run.run, server=url, **FEW)
    assert_named(proof, "thinking")
    assert proof.broken.finding.says == "thinking is on, and was off in training (thinking)"
    assert 'send "chat_template_kwargs": {"thinking": false} with each request' in str(proof.fix)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), 1e300])
def test_a_timeout_that_no_clock_can_wait_for(run, timeout):
    with pytest.raises(ConfigError, match="timeout: it is .*; seconds, above 0. Fix: timeout=120"):
        proving.prove(run.run, server="http://localhost:1", timeout=timeout)
