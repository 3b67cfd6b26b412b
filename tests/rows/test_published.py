"""Rows in the spelling of published data sets and of other tools: what is learned, proposed, or refused, and why.

Each row stands for four: {k} is the number of the row."""
import json
import re

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.rows.columns import parse_fields
from sft_nb.rows.readers import as_messages
from sft_nb.tokens.prepare import prepare

Q, A = "What is {k} plus two?", "It is two more than {k}."
USER, ANSWER = dict(role="user", content=Q), dict(role="assistant", content=A)
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}
PARAMETERS = dict(type="object", properties=dict(city=dict(type="string")))
TOOL = dict(name="weather", description="Weather", parameters=PARAMETERS)
CALL = json.dumps(dict(name="weather", arguments=dict(city="Oslo")))


def with_number(x, k):
    if isinstance(x, str): return x.replace("{k}", str(k))
    if isinstance(x, list): return [with_number(part, k) for part in x]
    return {with_number(key, k): with_number(v, k) for key, v in x.items()} if isinstance(x, dict) else x


def read(row, **settings):
    rows = [with_number(row, k) for k in range(4)] if isinstance(row, dict) else row
    return prepare(load_config("default", model="tiny", train_file="rows.jsonl", eval_samples=0, **settings),
            train=rows)


def learned(data)->list[str]:
    "What the first example supervises, in pieces"
    x, pieces = data.train.tokens[0], [[]]
    for token in x["labels"]:
        if token != -100: pieces[-1].append(token)
        elif pieces[-1]: pieces.append([])
    return [data.tokenizer.decode(piece).replace("<|im_end|>", "") for piece in pieces if piece]


def prompt(data)->str: return data.tokenizer.decode(data.train.tokens[0]["input_ids"])


FIRST = A.replace("{k}", "0")
READ = dict(   # name -> row, learned of the first row
    alpaca=(dict(instruction=Q, input="", output=A, text="### Instruction:\n" + Q + "\n### Response:\n" + A), [FIRST]),
    alpaca_history=(dict(instruction=Q, output=A, history=[["Hi", "Hello"]]), ["Hello", FIRST]),
    history_of_messages=(dict(instruction=Q, output=A, history=[
        dict(role="USER", message="Hi"), dict(role="CHATBOT", message="Hello")]), ["Hello", FIRST]),
    lima=(dict(conversations=[Q, A], source="stackexchange"), [FIRST]),
    human_assistant=(dict(conversations=[dict(human=Q, assistant=A)]), [FIRST]),
    capybara_named=(dict(messages=[dict(input=Q, output=A), dict(input="And?", output="No more.")]), [FIRST,
            "No more."]),
    cohere=(dict(messages=[dict(role="System", content="s"), dict(role="User", content=Q),
                           dict(role="Chatbot", content=A)]), [FIRST]),
    slimorca=(dict(conversations=[HUMAN | dict(weight=0.), GPT | dict(weight=1.)]), [FIRST]),
    openhermes=(dict(conversations=[HUMAN | dict(weight=None), GPT | dict(weight=None)], source="x", title=None),
            [FIRST]),
    apigen=(dict(system="s", tools=json.dumps([TOOL]), conversations=[
        HUMAN, {"from": "function_call", "value": CALL}, {"from": "observation", "value": "4 C"}, GPT]), [CALL, FIRST]),
    toolace=(dict(system="s", conversations=[{"from": "user", "value": Q}, {"from": "assistant", "value": "[f()]"},
                                             {"from": "tool", "value": "[]"}, GPT]), ["[f()]", FIRST]),
    hermes=(dict(conversations=[{"from": "system", "value": "s"}, HUMAN, {"from": "gpt", "value": "<tool_call>\n{}"},
                                {"from": "tool", "value": "4"}, GPT], tools=json.dumps([TOOL])),
            ["<tool_call>\n{}", FIRST]),
    openthoughts=(dict(system="s", conversations=[HUMAN, {
        "from": "assistant", "value": "<|begin_of_thought|>hm<|end_of_thought|>" + A}]),
        ["<|begin_of_thought|>hm<|end_of_thought|>" + FIRST]),
    magpie=(dict(uuid="b{k}", instruction=Q, response=A, conversations=[HUMAN, GPT], reward_model="m"), [FIRST]),
    no_robots=(dict(prompt=Q, prompt_id="f{k}a", messages=[USER, ANSWER], category="Open QA"), [FIRST]),
    ultrafeedback_binarized=(dict(prompt=Q, chosen=[USER, ANSWER], rejected=[USER, ANSWER | dict(content="BAD")],
                                  messages=[USER, ANSWER], score_chosen=8.), [FIRST]),
    sql_create_context=(dict(question=Q, context="CREATE TABLE t (a INT)", answer="SELECT {k}"), ["SELECT 0"]),
    limo=(dict(question=Q, solution="We add.", answer="{k}2"), ["02"]),
    vertex=(dict(contents=[dict(role="user", parts=[dict(text=Q)]), dict(role="model", parts=[dict(text=A)])]),
            [FIRST]),
    openai_preference=(dict(input=dict(messages=[USER]), preferred_output=[ANSWER],
                            non_preferred_output=[ANSWER | dict(content="BAD")]), [FIRST]),
    axolotl_segments=(dict(segments=[dict(text="Hello {k} ", label=False), dict(text="there. ", label=True),
                                     dict(text="bye ", label=False), dict(text="friend", label=True)]),
                      ["there. ", "friend"]),
    nemo=(dict(mask="User", system="s", conversations=[{"from": "User", "value": Q}, {"from": "Assistant",
            "value": A}]),
          [FIRST]),
    swift_rejected=(dict(messages=[USER, ANSWER], rejected_response="BAD"), [FIRST]),
    kto=(dict(prompt=Q, completion=A, label=True), [FIRST]),
    langchain=(dict(messages=[dict(type="human", data=dict(content=Q)), dict(type="ai", data=dict(content=A))]),
               [FIRST]),
    langchain_dumped=(dict(messages=[dict(lc=1, type="constructor", kwargs=dict(content=text), id=["langchain", name])
                                     for text, name in ((Q, "HumanMessage"), (A, "AIMessageChunk"))]), [FIRST]),
    langchain_calls=(dict(messages=[
        dict(type="human", content=Q), dict(type="ai", content="", tool_calls=[dict(name="f", args={}, id="c")]),
        dict(type="tool", content="x", tool_call_id="c"), dict(type="ai", content=A)]),
                     ['{"name": "f", "arguments": {}}', FIRST]),
    messages_as_json=(dict(prompt=json.dumps([USER]), completion=json.dumps(ANSWER)), [FIRST]),
    author_body=(dict(messages=[dict(author="customer", body=Q), dict(author="Support", body=A)]), [FIRST]),
    speaker_utterance=(dict(messages=[dict(speaker="user", utterance=Q), dict(speaker="assistant", utterance=A)]),
                       [FIRST]),
    name_message=(dict(messages=[dict(name="User", message=Q), dict(name="Agent", message=A)]), [FIRST]),
    chinese_roles=(dict(messages=[dict(role="系统", content="s"), dict(role="用户", content=Q),
                                  dict(role="助手", content=A)]), [FIRST]),
    messages_as_sorted_json=(dict(prompt=json.dumps([USER], sort_keys=True), completion=A), [FIRST]),
    json_with_a_role=(dict(prompt=Q, completion=json.dumps(dict(role="admin", content="x"))),
                      ['{"role": "admin", "content": "x"}']),
    json_of_a_talk=(dict(prompt=Q, completion=json.dumps([USER | dict(content="a"), ANSWER | dict(content="b")])),
                    [json.dumps([dict(role="user", content="a"), dict(role="assistant", content="b")])]),
    agent_instruct=(dict(conversations=[HUMAN | dict(loss=None), GPT | dict(value="OK", loss=False), HUMAN,
                                        GPT | dict(loss=True)]), [FIRST]))


@pytest.mark.parametrize("name", READ)
def test_what_is_learned(name):
    row, expected = READ[name]
    assert learned(read(row)) == expected


TEXTS = dict(sentence1="First {k}.", sentence2="Second {k}.")
NLI = dict(premise="It rains {k}.", hypothesis="It is wet {k}.")
PROPOSED = dict(   # name -> row, settings of the first fix, learned of the first row, a part of its prompt
    items=(dict(id="i", items=[HUMAN, GPT]), "messages=items", FIRST, "What is 0"),
    wildchat=(dict(conversation_hash="f{k}", model="m", conversation=[
        USER | dict(toxic=False, hashed_ip="x"), ANSWER | dict(toxic=False)], turn=1), "messages=conversation", FIRST,
                ""),
    swift_conversation=(dict(system="Be brief.", conversation=[dict(human=Q, assistant=A)]), "messages=conversation",
                        FIRST, "Be brief."),
    ultrachat=(dict(id="{k}", data=[Q, A]), "messages=data", FIRST, "What is 0"),
    dailydialog=(dict(dialog=[Q, A], act=[2, 1], emotion=[0, 0]), "messages=dialog", FIRST, "What is 0"),
    cohere_history=(dict(message=Q, chat_history=[dict(role="USER", message="Hi"), dict(role="CHATBOT",
            message="Hello")],
                         response=A), "instruction=message output=response history=chat_history", "Hello", "What is 0"),
    dolly=(dict(instruction=Q, context="Sums.", response=A, category="x"), "output=response", FIRST, "Sums."),
    openorca=(dict(id="n.{k}", system_prompt="Think.", question=Q, response=A), "answer=response system=system_prompt",
              FIRST, "Think."),
    squad=(dict(id="57{k}", title="Sums", context="About {k}.", question=Q, answers=dict(text=[A], answer_start=[3])),
           "answer=answers.text[0]", FIRST, "About 0."),
    ms_marco=(dict(query_id=3, query=Q, answers=[A], wellFormedAnswers=[], passages=dict(
        is_selected=[0, 1], passage_text=["One {k}.", "Two {k}."])),
              "question=query answer=answers[0] context=passages.passage_text", FIRST, "One 0.\n\nTwo 0."),
    eli5=(dict(q_id="q{k}", title=Q, selftext="", answers=dict(a_id=["a"], text=[A], score=[3])),
          "question=title answer=answers.text[0]", FIRST, "What is 0"),
    verl=(dict(data_source="x", prompt=[USER], reward_model=dict(style="rule", ground_truth="g {k}"), extra_info=dict(
        split="train", index=3)), "prompt=prompt completion=reward_model.ground_truth", "g 0", "What is 0"),
    verl_gsm8k=(dict(prompt=[USER], reward_model=dict(ground_truth="{k}"), extra_info=dict(answer=A, question=Q)),
                "prompt=prompt completion=extra_info.answer", FIRST, "What is 0"),
    langsmith_chat=(dict(inputs=dict(messages=[dict(type="human", content=Q)]), outputs=dict(output=dict(content=A))),
                    "prompt=inputs.messages completion=outputs.output.content", FIRST, "What is 0"),
    langsmith_lists=(dict(inputs=dict(messages=[USER]), outputs=dict(messages=[ANSWER])),
                     "prompt=inputs.messages completion=outputs.messages", FIRST, "What is 0"),
    claude=(dict(uuid="{k}", name="x", chat_messages=[dict(text=Q, sender="human"), dict(text=A, sender="assistant")]),
            "messages=chat_messages", FIRST, "What is 0"),
    thread=(dict(id="{k}", thread=[dict(author="user", body=Q), dict(author="assistant", body=A)]), "messages=thread",
            FIRST, "What is 0"),
    named_dialogue=(dict(dialogue=[dict(name="user", message=Q), dict(name="assistant", message=A)]),
                    "messages=dialogue", FIRST, "What is 0"),
    hub_viewer=(dict(row_idx="{k}", row=dict(messages=[USER, ANSWER])), "messages=row.messages", FIRST, "What is 0"),
    api_log=(dict(request=dict(model="m", messages=[USER]), response=dict(choices=[dict(
        index=0, message=ANSWER, finish_reason="stop")])),
             "prompt=request.messages completion=response.choices[0].message", FIRST, "What is 0"),
    anthropic_log=(dict(request=dict(model="m", system="Be short.", messages=[USER]), response=dict(
        id="m{k}", type="message", role="assistant", content=[dict(type="text", text=A)], stop_reason="end_turn")),
                   "prompt=request.messages completion=response system=request.system", FIRST, "Be short."),
    gemini_log=(dict(request=dict(contents=[dict(role="user", parts=[dict(text=Q)])]), response=dict(candidates=[dict(
        content=dict(role="model", parts=[dict(text=A)]), finishReason="STOP", index=0)])),
                "prompt=request.contents completion=response.candidates[0].content", FIRST, "What is 0"),
    mlflow=(dict(request=json.dumps(dict(messages=[USER])),
                 response=json.dumps(dict(choices=[dict(message=ANSWER, finish_reason="stop")]))),
            "prompt=request.messages completion=response.choices[0].message", FIRST, "What is 0"),
    braintrust=(dict(id="t{k}", input=dict(question=Q), output="wrong {k}", expected=A, scores=dict(Factuality=.5)),
                "question=input.question answer=expected", FIRST, "What is 0"),
    bird=(dict(db_id="d", question=Q, evidence="id {k}", SQL="SELECT {k}"), "answer=SQL context=evidence", "SELECT 0",
          "id 0"),
    langsmith=(dict(id="{k}", inputs=dict(question=Q), outputs=dict(answer=A)),
               "question=inputs.question answer=outputs.answer", FIRST, "What is 0"),
    argilla=({"prompt": Q, "answer.responses": [A], "answer.responses.users": ["u"], "answer.suggestion": "x {k}"},
             "completion=answer.responses[0]", FIRST, "What is 0"),
    metamath=(dict(query=Q, response=A, type="GSM", original_question="1+1?"), "question=query answer=response", FIRST,
            ""),
    openr1=(dict(problem=Q, solution="We add {k}.", answer="{k}2", source="x", generations=["a", "b"]),
            "question=problem answer=solution", "We add 0.", "What is 0"),
    deepmath=(dict(question=Q, final_answer="{k}2", topic="x", r1_solution_1="One {k}", r1_solution_2="Two {k}"),
              "answer=r1_solution_1", "One 0", "What is 0"),
    diff=(dict(diff="-x = {k}\n+x = 2", message="Set x, {k}"), "question=diff answer=message", "Set x, 0", "-x = 0"),
    commits=(dict(hash="abc{k}", message="Fix {k}", original_message="fix {k}", mods=[
        dict(change_type="MODIFY", diff="-a {k}"), dict(change_type="ADD", diff="+b {k}")], repo="a/b"),
        "question=mods.diff answer=message", "Fix 0", "-a 0\n\n+b 0"),
    commitpackft=(dict(commit="0d{k}", old_file="a.py", new_file="a.py", old_contents="x = {k}",
            new_contents="x = {k}1",
                       message="Bump {k}"), "instruction=message output=new_contents input=old_contents", "x = 01",
                  "Bump 0\nx = 0"),
    spider=(dict(db_id="d", query="SELECT {k} FROM t", question=Q, query_toks=["SELECT"]), "answer=query",
            "SELECT 0 FROM t", "What is 0"),
    spider_with_schema=(dict(db_id="d", question=Q, query="SELECT {k} FROM t", schema="CREATE TABLE t (id INT)"),
                        "answer=query context=schema", "SELECT 0 FROM t", "CREATE TABLE t"),
    gretel=(dict(id=1, sql_prompt=Q, sql_context="CREATE TABLE t", sql_complexity="single", sql="SELECT {k}",
                 sql_explanation="It selects."), "question=sql_prompt answer=sql context=sql_context", "SELECT 0",
            "CREATE TABLE t"),
    apps=(dict(problem_id=1, question=Q, solutions="print({k})", input_output="{}"), "answer=solutions", "print(0)",
            ""),
    github=(dict(code="def f{k}(): pass", repo_name="a/b", path="a.py", language="Python", size=100), "text=code",
            "ef f0(): pass", ""),
    haystack_documents=(dict(content="About {k}.", meta=dict(name="a.txt"), id="d{k}", score=None), "text=content",
                        "bout 0.", ""),
    qnli=(dict(question=Q, sentence="A sentence.", label=0), "question=question + sentence answer=label", "0",
          "What is 0 plus two?\n\nA sentence."),
    mrpc=(TEXTS | dict(label=1, idx="{k}"), "question=sentence1 + sentence2 answer=label", "1",
            "First 0.\n\nSecond 0."),
    snli=([{key: v.replace("{k}", str(k)) for key, v in NLI.items()} | dict(label=k % 3) for k in range(6)],
          "question=premise + hypothesis answer=label", "0", "It rains 0.\n\nIt is wet 0."),
    sst2=([dict(sentence=f"Film {k} was fine.", label=k % 2, idx=k) for k in range(6)],
            "question=sentence answer=label",
          "0", "Film 0"),
    sciq=(dict(question=Q, distractor1="Fire", distractor2="Sand", correct_answer=A, support="Water is wet."),
          "answer=correct_answer context=support", FIRST, "Water is wet."))


@pytest.mark.parametrize("name", PROPOSED)
def test_what_is_proposed_teaches_the_answer(name):
    row, fields, answer, part = PROPOSED[name]
    with pytest.raises(SftError) as e: read(row)
    assert e.value.fix.settings == dict(fields=tuple(re.split(r" (?=\w+=)", fields)))
    data = read(row, **e.value.fix.settings)
    assert learned(data)[0] == answer and part in prompt(data)


def test_the_log_of_an_api_teaches_the_message_and_tells_which_answers_were_cut():
    choice = dict(finish_reason="length", index=0, message=dict(role="assistant", content="{k} is", refusal=None))
    rows = [with_number(dict(request=dict(messages=[USER]), response=dict(id="c{k}", choices=[choice | dict(
        finish_reason="length" if k % 4 == 0 else "stop")])), k) for k in range(12)]
    with pytest.raises(SftError) as e: read(rows)
    assert e.value.fix.settings["fields"] == ("prompt=request.messages", "completion=response.choices[0].message")
    data = read(rows, **e.value.fix.settings)
    found = {f.check: f for f in data.report.findings if f.status == "warn"}
    assert found["train_rejected"].says.endswith("response.choices[0].finish_reason: length in 3 rows")
    assert "train_columns" not in found
    left = read(rows, **found["train_rejected"].fix.settings)
    assert left.train.reasons == {"train is False": 3} and len(left.train) == 9


@pytest.mark.parametrize("column, left_out, learned_too", [
    ("correct", [0, "0", False, "no"], [1, "yes"]), ("decision", ["no", 0, "rejected"], ["yes", 1, "new"]),
    ("is_wrong", [1, "yes", True], [0, "no", False]), ("stop_reason", ["max_tokens", 0], ["end_turn"])])
def test_a_flag_stays_a_flag_whatever_its_column_is_called(column, left_out, learned_too):
    for values, kept in ((left_out, 0), (learned_too, 1)):
        for value in values:
            rows = [{"question": "1+1?", "answer": "2", column: value},
                    {"question": "1+2?", "answer": "3", column: None}]
            assert len(read(rows, fields=(f"train={column}",)).train) == 1 + kept, value


@pytest.mark.parametrize("labels", [["billing", "urgent"], [3, 7], dict(intent="pay")])
def test_several_labels_beside_a_text_are_told_with_what_is_learned_instead(labels):
    found = {f.check: f for f in read([dict(text=f"Mail {k}", labels=labels) for k in range(9)]).report.findings}
    assert "the whole text is learned, without question and answer" in found["train_columns"].says
    assert found["train_columns"].fix.says("shell").startswith(
        "write labels as one text, then --fields question=text answer=labels")


def test_answers_that_a_column_or_a_part_of_one_calls_bad_are_left_out_by_the_proposed_command():
    def judged(flag, bad, good): return [dict(question=f"{k}+{k}?", answer=str(2*k)) | flag(good if k % 3 else bad)
                                         for k in range(9)]
    for rows, named in ((judged(lambda v: dict(status=v), "Rejected", "new"), "status"),
                        (judged(lambda v: dict(is_wrong=v), True, False), "is_wrong"),
                        (judged(lambda v: dict(meta=dict(quality=v, by="x")), "bad", "fine"), "meta.quality")):
        found = {f.check: f for f in read(rows).report.findings}["train_rejected"]
        assert found.fix.settings == dict(fields=(f"train={named}",))
        assert read(rows, **found.fix.settings).train.reasons == {"train is False": 3}
    chat = [dict(messages=[USER, dict(role="assistant", content=str(k), feedback="thumbs_down")]) for k in range(9)]
    assert "fields" not in {f.check: f for f in read(chat).report.findings}["train_rejected"].fix.settings


@pytest.mark.parametrize("path", ["message", "message.content"])
def test_answers_of_an_api_that_failed_or_were_refused_and_second_choices(path):
    def choice(text): return dict(index=0, message=dict(role="assistant", content=text))
    def answered(*texts): return dict(request=dict(messages=[USER]), response=dict(choices=[*map(choice, texts)]))
    failed = dict(request=dict(messages=[USER]), response=dict(error=dict(message="Rate limit")))
    fields = ("prompt=request.messages", f"completion=response.choices[0].{path}")
    with pytest.raises(SftError, match="response holds an error and no message: 'Rate limit'; .*on_bad_row='drop'"):
        read([answered("Yes."), failed], fields=fields)
    rows = [answered("Yes."), failed, answered(None), answered("So.", "No."), answered("So.", "So.")]
    data = read(rows, fields=fields, on_bad_row="drop")
    assert len(data.train) == 3
    assert [*data.train.reasons] == ["response holds an error and no message: 'Rate limit'", "empty answer"]
    assert data.train.seen.unread[f"response.choices[1].{path}"] == 1
    said, = [f.says for f in data.report.findings if f.check == "train_columns"]
    assert said == f"response.choices[1].{path} is not used in any conversation"


def test_an_answer_that_is_no_message_is_to_be_written_with_its_own_role():
    with pytest.raises(SftError) as e: read([dict(prompt="Hi?", completion=dict(state="lost"))])
    assert '{"role": "assistant", "content": "..."}' in str(e.value.fix)


def test_an_unknown_speaker_is_to_be_called_by_the_words_of_its_file():
    turns = [{"from": "human", "value": "Hi?"}, {"from": "bard", "value": "Yes."}]
    with pytest.raises(SftError, match="write human or gpt instead of bard in turn 2"):
        read([dict(conversations=turns)])


def test_rows_that_repeat_one_are_given_the_proposal_of_one():
    for settings in ({}, dict(on_bad_row="drop")):
        with pytest.raises(SftError) as e: read([dict(q="One?", a="Two")] * 5, **settings)
        assert ("fields", ("question=q", "answer=a")) in e.value.fix.settings.items()


def test_preferences_with_equal_scores_are_counted():
    rows = [dict(prompt=f"{k}?", chosen="Yes.", rejected="No.", score_chosen=4., score_rejected=4. - k % 3)
            for k in range(6)]
    said, = [f.says for f in read(rows).report.findings if f.check == "train_pairs"]
    assert said.endswith("; in 2 of them both have the same score")


def test_the_input_of_a_trace_holds_its_messages():
    data = read(dict(id="t{k}", input=dict(messages=[USER]), output=ANSWER, metadata=dict(env="prod")))
    assert learned(data)[0] == FIRST and "What is 0" in prompt(data)


def test_what_only_begins_like_messages_is_a_text():
    for text in ('[{"role": ' + "[" * 50_000, '{"role": "user", "content": ', '[]', '["role"]'):
        assert as_messages(text, "user", "prompt") == [dict(role="user", content=text)]


TRANSLATION = dict(de="Hallo {k}", en="Hello {k}")


@pytest.mark.parametrize("row, task, answer", [
    (dict(translation=TRANSLATION), "translate", "Hello 0"), (TRANSLATION, "translate", "Hello 0"),
    (dict(id="{k}", translation=TRANSLATION), "translate", "Hello 0"),
    (NLI | dict(label=1), "nli", '{"thought_process": "", "predicted_label": 1}'),
    (NLI | dict(label="neutral"), "nli", '{"thought_process": "", "predicted_label": 0}')])
def test_a_task_whose_columns_the_rows_have_is_proposed(row, task, answer):
    with pytest.raises(SftError) as e: read(row)
    assert e.value.fix.settings == dict(task=task)
    assert learned(read(row, task=task)) == [answer]


def test_the_classes_of_snli_are_not_those_of_the_task():
    rows = [{key: v.replace("{k}", str(k)) for key, v in NLI.items()} | dict(label=2) for k in range(4)]
    with pytest.raises(SftError, match="its label is '2'; .*SNLI's and MNLI's 0, 1 and 2 are entailment"):
        read(rows, task="nli")


REASONING = dict(   # name -> row, fields with a thought
    medical=(dict(Question=Q, Complex_CoT="Hm {k}.", Response=A),
            "question=Question answer=Response reasoning=Complex_CoT"),
    s1k=(dict(solution="{k}2", question=Q, cot_type="math", metadata="{}", cot=None, thinking_trajectories=["Hm {k}."],
              attempt=A), "answer=attempt reasoning=thinking_trajectories[0]"),
    s1k_11=(dict(solution="{k}2", question=Q, cot_type="math", deepseek_thinking_trajectory="Hm {k}.",
            deepseek_attempt=A,
                 gemini_thinking_trajectory="Ho {k}.", gemini_attempt="Gem {k}."),
            "answer=deepseek_attempt reasoning=deepseek_thinking_trajectory"),
    openthoughts=(dict(problem=Q, deepseek_reasoning="Hm {k}.", deepseek_solution=A, ground_truth_solution=None),
                  "question=problem answer=deepseek_solution reasoning=deepseek_reasoning"))


@pytest.mark.parametrize("name", REASONING)
def test_a_thought_is_proposed_with_its_answer(name):
    row, fields = REASONING[name]
    with pytest.raises(SftError) as e: read(row)
    assert e.value.fix.settings == dict(fields=tuple(fields.split()))
    assert learned(read(row, reasoning="inline", **e.value.fix.settings)) == [f"<think>\nHm 0.\n</think>\n\n{FIRST}"]


def test_the_summary_of_a_response_is_its_reasoning():
    items = [dict(type="reasoning", summary=[dict(type="summary_text", text="Hm."), dict(type="summary_text",
            text="So.")]),
             dict(type="message", role="assistant", content=[dict(type="output_text", text=A)])]
    data = read(dict(input=[USER], output=items), reasoning="inline")
    assert learned(data) == [f"<think>\nHm.\nSo.\n</think>\n\n{FIRST}"] and not data.train.seen.unread


REFUSED = dict(   # name -> row, what the error says, what its fix says
    glaive_v1=(dict(sample="SYSTEM: s\nUSER: " + Q + "\nASSISTANT: " + A), "no format has those", "a transcript"),
    glaive_v2=(dict(system="s", chat="USER: " + Q + "\n\n\nASSISTANT: " + A), "no format has those", "a transcript"),
    baize=(dict(topic=Q, input="[|Human|] " + Q + "\n[|AI|] " + A), "no format has those", "input, a transcript"),
    hh_rlhf=(dict(chosen="\n\nHuman: " + Q, rejected="\n\nHuman: x"), "chosen is text", "add prompt to the row"),
    winner=(dict(prompt=Q, response_a=A, response_b="Worse {k}.", winner="a"), "no format", "better one .winner tells"),
    arena=(dict(question_id="q{k}", model_a="x", model_b="y", winner="model_a", conversation_a=[USER, ANSWER],
                conversation_b=[USER, ANSWER]), "no format", "of conversation_a, conversation_b, write the better one"),
    shp=(dict(post_id="i{k}", history=Q, human_ref_A=A, human_ref_B="Worse {k}.", score_A=34, score_B=3, labels=1),
         "no format", "of human_ref_A, human_ref_B, write the better one"),
    stack_exchange=(dict(qid=3, question=Q, response_j=A, response_k="Worse {k}."), "no format", "DPOTrainer"),
    ultrafeedback=(dict(instruction=Q, completions=[dict(response="BAD"), dict(response=A)], correct_answers=["None"],
                        incorrect_answers=["None"]), "no format", "write the text of completions as a column"),
    batch_output=(dict(id="b{k}", custom_id="r{k}", response=dict(body=dict(choices=[])), error=None),
                  "an answer of OpenAI's batch API", "with this custom_id"),
    batch_input=(dict(custom_id="r{k}", method="POST", body=dict(messages=[USER])), "a request to OpenAI's batch API",
            ""),
    chatgpt=(dict(title="x", mapping=dict(a=dict(message=None, children=[])), current_node="a"), "ChatGPT exported",
             "path from current_node"),
    kili=(dict(content=Q, externalId="e{k}", labels=[dict(jsonResponse={})]), "an asset of Kili", "as columns"),
    prodigy=(dict(text=Q, label="INSULT", answer="accept", _input_hash=1, _task_hash=2), "a task of Prodigy", "accept"),
    squad_article=(dict(title="x", paragraphs=[dict(context=A, qas=[])]), "an article of SQuAD", "context, question"),
    arc=(dict(id="M{k}", question=Q, choices=dict(text=["a", "b"], label=["A", "B"]), answerKey="B"), "no format",
         "choices into the question"),
    medmcqa=(dict(question=Q, opa="a {k}", opb="b {k}", opc="c", opd="d", cop=1), "no format",
            "opa, opb, opc, opd into"),
    quiz=({"Frage": Q, "AntwortA": "Bergen", "AntwortB": "Oslo", "Richtig": "B"}, "no format",
            "AntwortA, AntwortB into"),
    quiz_with_numbers=({"Frage": Q, "Antwort 1": "Bergen", "Antwort 2": "Oslo", "Richtige Antwort": "Oslo"},
            "no format",
                       "Antwort 1, Antwort 2 into the question"),
    unknown=(dict(kolA="De lamp {k} is stuk.", kolB="Nummer {k} komt morgen.", kolC="Een tekst {k}."), "no format",
             "name the columns in fields"),
    self_instruct=(dict(instruction=Q, instances=[dict(input="", output=A)], name="x"), "no format",
            "a task of your own"),
    steps=(dict(prompt=Q, completions=["a", "b"], labels=[True, False]), "no format", "the text of completions"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name):
    row, found, fix = REFUSED[name]
    with pytest.raises(SftError, match=found) as e: read(row)
    assert re.search(fix, str(e.value.fix))
    choices = dict(task="multiple_choice") if name in ("arc", "medmcqa") else {}
    assert e.value.fix.settings == choices, "nothing is proposed that would teach another column"


def test_a_preference_with_its_question_in_another_column():
    row = dict(system="s", question=Q, chosen=A, rejected="BAD {k}")
    with pytest.raises(SftError, match="there is no prompt") as e: read(row)
    assert e.value.fix.settings == dict(fields=("prompt=question",))
    assert learned(read(row, **e.value.fix.settings)) == [FIRST]


def warning(row, **settings):
    return next((f for f in read(row, **settings).report.findings if f.check == "train_columns"), None)


@pytest.mark.parametrize("row, fields", [
    (dict(question=Q, passage="About {k}.", answer=A), "context=passage"),
    (dict(question=Q, contexts=["One.", "Two."], answer=A), "context=contexts"),
    (dict(question=Q, documents=[dict(title="x", text="One.")], answer=A), "context=documents"),
    (dict(messages=[USER, ANSWER], tools_json=json.dumps([TOOL])), "tools=tools_json"),
    (dict(prompt=Q, completion=A, system_prompt="Think."), "system=system_prompt")])
def test_a_column_that_belongs_to_the_prompt_is_proposed(row, fields):
    found = warning(row)
    assert found.status == "warn" and found.fix.settings == dict(fields=(fields,))
    assert not read(row, **found.fix.settings).train.seen.unread


@pytest.mark.parametrize("label", [["positive"], ["a longer text about {k}"]])
def test_a_label_in_a_list_of_one_is_proposed(label):
    "As doccano and Argilla export it"
    found = warning(dict(id="{k}", text=Q, label=label, Comments=[]))
    assert found.fix.settings == dict(fields=("question=text", "answer=label[0]"))
    argilla = warning({"text": Q, "label.responses": label, "label.responses.users": ["u"]})
    assert argilla.fix.settings == dict(fields=("question=text", "answer=label.responses[0]"))
    assert not any("users" in str(fix.settings.get("fields")) for fix in argilla.fix.otherwise)


def test_only_columns_that_may_be_learned_are_named_and_all_of_them_ignored():
    names = [f"{word}_remark" for word in "his her our their my your its one".split()]
    row = dict(id="{k}", source="x", url="https://a.b/{k}", prompt=Q, completion=A) | dict.fromkeys(names, "fine")
    found = warning(row)
    assert found.fix.settings == dict(ignore_columns=tuple(names)) and "source" not in found.says
    assert warning(row, **found.fix.settings).status == "ok"


def test_a_copy_of_all_messages_is_no_column_that_was_forgotten():
    assert warning(dict(instruction=Q, output=A, text="Below: " + Q + "\n" + A)) is None
    assert warning(dict(instruction=Q, output=A, text="Below: " + Q)).status == "warn"


FLAGGED = ANSWER | dict(metadata=dict(source="x", review=dict(train=False)))


@pytest.mark.parametrize("row, name", [
    (dict(messages=[USER, FLAGGED]), "messages.metadata.review.train"),
    (dict(prompt=Q, completion=A, metadata=dict(loss_mask=0)), "metadata.loss_mask")])
def test_flags_in_metadata_are_a_warning(row, name):
    found = warning(row)
    assert found.status == "warn" and f"{name} may exclude something from the loss" in found.says
    last = (found.fix, *found.fix.otherwise)[1]
    assert last.settings == dict(ignore_columns=(name,))
    assert (warning(row, **last.settings) or found).status != "warn" or "train" not in name


def test_prompts_that_cannot_be_learned_are_counted():
    talk = [USER, dict(role="assistant", content="BAD", weight=0), dict(role="user", content="Again"), ANSWER]
    def finding(**more):
        found = read(dict(messages=talk), train_on_prompt=True, **more).report.findings
        return next((f for f in found if f.check == "train_prompts"), None)
    assert finding() is None   # the excluded answer is masked where it stands
    template = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last or m['role'] != 'assistant' %}"
                "{{ m['content'] }}{% else %}{{ m['content'] | lower }}{% endif %}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    found = finding(chat_template=template)
    assert found.status == "warn" and "4 prompts are not learned" in found.says


@pytest.mark.parametrize("messages, expected", [
    ([dict(speaker="Bob", utterance="Hi?"), dict(speaker="Alice", utterance="Yes.")],
     "write user or assistant instead of Bob in message 1"),
    ([dict(role="user", phrase="Hi?", time=3), dict(role="assistant", phrase="Yes.")],
     'write message 1 as {"role": "user", "content": "..."}')])
def test_messages_without_a_known_role_or_a_known_text_are_no_empty_answers(messages, expected):
    with pytest.raises(SftError) as e: read(dict(messages=messages))
    assert str(e.value.fix) == expected


@pytest.mark.parametrize("given, proposed", [
    (("Text", "Abteilung"), ("question=Text", "answer=Abteilung")),
    (("Text",), ("question=Problem", "answer=Solution")),
    (("Text", "answer=Abteilung"), ("question=Problem", "answer=Solution"))])
def test_columns_that_are_named_without_their_fields(given, proposed):
    with pytest.raises(ConfigError, match="fields: 'Text' is not a pair; field=column") as e: parse_fields(given, ())
    assert e.value.fix.settings == dict(fields=proposed)


def test_a_system_prompt_that_rows_do_not_take_is_told():
    rows = [dict(messages=[dict(role="system", content=f"Be {k}."), USER, ANSWER]) for k in range(3)]
    found = {f.check: f for f in read(rows, system_prompt="Be nice.").report.findings}
    assert found["train_system"].says.startswith("system_prompt is not written into rows with a system message")
    nice = dict(role="system", content="Be nice.")
    for taken in ([dict(messages=[USER, ANSWER])] * 3, [dict(messages=[nice, USER, ANSWER])]):
        assert "train_system" not in [f.check for f in read(taken, system_prompt="Be nice.").report.findings]


def test_names_of_speakers_are_told_unless_the_template_writes_them(tmp_path):
    rows = [dict(messages=[USER | dict(name="Anna"), ANSWER])] * 3
    assert read(rows).report.facts["columns_not_used"] == ["messages.name"]
    assert read([dict(messages=[USER | dict(name="user"), ANSWER])] * 3).report.facts["columns_not_used"] == []
    template = tmp_path/"names.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n"
                        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    assert read(rows, chat_template=str(template)).report.facts["columns_not_used"] == []


def test_no_other_column_stands_in_for_the_completion_that_was_named():
    "Argilla's export: the correction of a record that nobody has corrected is null"
    rows = [{"prompt": f"Be polite: {k}.", "response": "BAD",
             "corrected.responses": None if k % 2 else [f"Please {k}."]} for k in (1, 2, 3, 4)]
    data = read(rows, fields=dict(prompt="prompt", completion="corrected.responses[0]"), on_bad_row="drop")
    assert (data.train.n_kept, learned(data)) == (2, ["Please 2."])


def test_a_label_that_was_chosen_is_not_exchanged_for_a_longer_answer():
    rows = [dict(Text=f"Mail {k}", Kind="ab"[k % 2], Antwort=f"A long answer to mail {k}, with words.")
            for k in range(8)]
    data = read(rows, task="classify", fields=dict(question="Text", answer="Kind"))
    found = next(f for f in data.report.findings if f.check == "train_columns")
    assert "fields" not in found.fix.settings and "Antwort" in found.says


def test_a_colon_between_a_field_and_its_column():
    with pytest.raises(ConfigError, match="is not a pair; field=column") as e:
        parse_fields(("question:Beschreibung", "answer:Antwort"), ("question", "answer"))
    assert e.value.fix.settings == dict(fields=("question=Beschreibung", "answer=Antwort"))
