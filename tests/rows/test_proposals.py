"""Which columns are proposed as fields: in five languages, with what stands beside an answer and is none."""
import itertools, json

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.extras import proposals
from sft_nb.rows import readers
from sft_nb.rows.columns import ColumnRenamer, parse_fields
from sft_nb.rows.readers import detect, to_messages
from sft_nb.extras.proposals import propose_fields
from sft_nb.tokens.prepare import prepare

QUESTION, ANSWER = "How do I reset my password, number {}?", "Open the settings and choose reset ({})."
NAMES = dict(   # language -> names of questions, of answers, and of what is neither
    english=(("Query", "user_prompt", "instructions", "Ticket Text", "inputs"),
             ("answers", "model_output", "agentReply", "solutions", "final_response", "targets"),
             ("answer_id", "prompt_id", "created_at", "score", "source", "system_prompt", "tools", "metadata", "lang",
              "response_time", "question_type", "hint", "url")),
    german=(("Frage", "Kundenanfrage", "Aufgabenstellung", "ANWEISUNG"),
            ("Antwort", "Musterlösung", "Loesungsweg", "Ausgabe", "Zusammenfassung"),
            ("Ticket-Nr.", "Erstellt am", "Antwortdatum", "Quelle", "Bearbeiter-Kennung", "Sprache", "Bewertung",
             "Titel")),
    french=(("Question client", "Demande", "Énoncé", "consigne"),
            ("Réponse", "reponse_finale", "Solution", "Résumé"),
            ("Identifiant", "Date de réponse", "Langue", "Source", "Auteur", "Score")),
    spanish=(("Pregunta", "consulta_cliente", "Instrucción", "Problema"),
             ("Respuesta", "respuesta_final", "Solución", "Traducción", "Resumen"),
             ("Fecha", "id_respuesta", "Idioma", "Fuente", "Puntuación", "Etiqueta")),
    chinese=(("问题", "用户提问", "指令", "题目"), ("回答", "答案", "标准答案", "客服回复", "输出"),
             ("编号", "日期", "来源", "语言", "作者", "分数", "回答时间")))
TOOLS = json.dumps([dict(name="weather", description="The weather of a city", parameters=dict(city="str"))])
TEXT = "You are the assistant of a company and answer in one sentence."
BESIDE = ("2026-11-{:02d}", "TCK-10{:02d}", "https://example.org/{}", "{}", "imported", "9f3c21aa{:02d}", TEXT,
          "Reset {}")


def made_rows():
    "Name and rows: an empty one first, then question and answer between columns that are neither"
    for language, (questions, answers, others) in NAMES.items():
        beside = itertools.cycle(itertools.product(others, BESIDE))
        for k, (question, answer) in enumerate(itertools.product(questions, answers)):
            more = dict(itertools.islice(beside, k, k + 40, 7))
            more |= {name: dict(tools=TOOLS.replace("{", "{{").replace("}", "}}"), system_prompt=TEXT)[name]
                     for name in more if name in ("tools", "system_prompt")}
            names = [*list(more)[:2], *((question, answer) if k % 3 else (answer, question)), *list(more)[2:4]]
            texts = more | {question: QUESTION, answer: ANSWER}
            rows = [{name: texts[name].format(i) for name in names} for i in range(1, 9)]
            yield pytest.param([dict.fromkeys(names, ""), *rows], answer, id=f"{language}-{question}-{answer}")
            if k % 2:   # no answer at all
                yield pytest.param([{n: v for n, v in r.items() if n != answer} for r in rows], None,
                                   id=f"{language}-{question}-none")


def learned(rows, fix):
    "The answer of each row that has content, with the fields of a fix"
    rename = ColumnRenamer((), parse_fields(fix.settings["fields"], ()), {})
    return [to_messages(rename(row))[-1]["content"] for row in rows if any(row.values())]


ROWS = list(made_rows())


@pytest.mark.parametrize("rows, answer", ROWS)
def test_a_proposal_teaches_the_answer(rows, answer):
    fix = propose_fields(rows)
    if answer is None: assert fix is None
    else:
        for proposal in (fix, *fix.otherwise): assert learned(rows, proposal) == [row[answer] for row in rows[1:]]


def test_there_are_enough_of_them(): assert len(ROWS) >= 140


CALLS = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
TALK = [dict(role="user", content="Hi"), dict(role="assistant", content="Hello")]
GLAIVE = "USER: Add 0+1\n\n\nASSISTANT: 1 <|endoftext|>\n\n\nUSER: thanks\n\n\nASSISTANT: welcome <|endoftext|>"
PUBLISHED = dict(   # name -> row, and the columns that may be learned
    xlam=(dict(id=0, query="Weather?", answers=CALLS, tools=TOOLS), "answers"),
    squad=(dict(id="5733be28", title="Oslo", context="Oslo is in Norway.", question="Where?",
                answers=dict(text=["Norway"], answer_start=[11])), "Norway"),
    glaive=(dict(system="SYSTEM: Be brief.", chat=GLAIVE), ""),
    dolly=(dict(instruction="Where is Oslo?", context="Oslo is in Norway.", response="Norway", category="closed_qa"),
           "response"),
    openorca=(dict(id="niv.1", system_prompt="Be brief.", question="1+1?", response="2, of course"), "response"),
    metamath=(dict(query="What is 1+1?", response="It is 2.", type="GSM_Rephrased", original_question="1+1?"),
              "response"),
    commonsense=(dict(id="a1", question="Where do people buy tea?", question_concept="tea",
                      choices=dict(label=["A", "B"], text=["shop", "sea"]), answerKey="A"), ""),
    openbook=(dict(id="7-980", question_stem="The sun is", choices=dict(text=["hot"], label=["A"]), answerKey="A"), ""),
    hellaswag=(dict(ind=4, activity_label="Removing ice", ctx="A man", endings=["is wet", "is dry"], label="1"), ""),
    piqa=(dict(goal="Open it", sol1="Pull", sol2="Push", label=1), ""),
    copa=(dict(premise="He fell", choice1="He ran", choice2="He sat", question="cause", label=0), ""),
    winogrande=(dict(sentence="Ann met _", option1="Bo", option2="Cy", gold="1"), ""),
    sciq=(dict(question="What is wet?", distractor1="Fire", distractor2="Sand", correct_answer="Water",
               support="Water is wet."), "correct_answer"),
    truthful=(dict(type="Adversarial", category="Law", question="Is it legal?", best_answer="No, it is not",
                   correct_answers=["No"], incorrect_answers=["Yes"], source="https://a.b"), "best_answer"),
    qqp=(dict(question1="Why?", question2="How come?", is_duplicate=1), ""),
    numina=(dict(source="amc", problem="What is 1+1?", solution="Adding gives 2.", answer="2", problem_type="Algebra"),
            "solution answer"),
    magicoder=(dict(lang="python", raw_index=5, problem="Write a sum", solution="def f(a, b): return a + b"),
               "solution"),
    evol=(dict(instruction="Write a sum", response="def f(): ..."), "response"),
    dialogsum=(dict(id="t_0", dialogue="#Person1#: Hi\n#Person2#: Hello\n#Person1#: Bye\n#Person2#: Bye",
                    summary="Two people greet each other.", topic="greeting"), "summary"),
    xsum=(dict(document="A long text about Oslo.", summary="About Oslo.", id="35232142"), "summary"),
    cnn=(dict(article="A long text about Oslo.", highlights="About Oslo.", id="f001ec5c4704938247d27a44948eff"),
         "highlights"),
    wmt=(dict(translation=dict(en="Hello", de="Hallo")), ""),
    s1k=(dict(question="What is 1+1?", solution="It is 2.", cot=None, thinking_trajectories=["Hm."], cot_type="math",
              source_type="x", metadata="{}", attempt="2"), "solution attempt"),
    medical=(dict(Question="What helps?", Complex_CoT="Let me think about it.", Response="Rest."), "Response"),
    flan=(dict(inputs="Translate Hello", targets="Hallo", task="wmt"), "targets"),
    p3=(dict(inputs=[3, 4], inputs_pretokenized="Is it?", targets=[5], targets_pretokenized="Yes, it is"),
        "targets_pretokenized"),
    aya=(dict(inputs="Wer?", targets="Niemand.", language="German", language_code="deu", annotation_type="original",
              user_id="ca908e583236b208e473e89dae5c7b7d"), "targets"),
    nq=(dict(id="797803103760793766", document=dict(title="Oslo"), question=dict(text="where"),
             annotations=dict(id=[])), ""),
    bitext=(dict(flags="BQZ", instruction="cancel my order please", category="ORDER", intent="cancel_order",
                 response="I can help."), "response"),
    counsel=(dict(Context="I feel sad.", Response="Tell me more."), "Response"),
    chatdoctor=(dict(description="Q. Pain", Patient="It hurts here.", Doctor="Rest it."), "Doctor"),
    tickets={}, capybara=(dict(source="Airoboros", conversation=[dict(input="Hi", output="Hello")]),
                        "conversation"),
    last_user=(dict(prompt_id="3", dialog=TALK[:1], reply="Hello"), "reply"),
    conversation=(dict(id=1, dialog=TALK, score=.5), "dialog"),
    openr1=(dict(problem="What is 1+1?", solution="Adding gives 2.", answer="2", uuid="0f3c-aa12", source="amc",
                 generation="<think>1+1</think>It is 2."), "generation solution answer"),
    sms=(dict(sms="Win a prize now", label="spam"), "label"))
PUBLISHED["tickets"] = ({
    "Ticket ID": 1, "Customer Email": "a@b.org", "Ticket Type": "Technical issue", "Ticket Subject": "Setup",
    "Ticket Priority": "Critical", "Ticket Description": "It does not start.", "Ticket Status": "Closed",
    "Resolution": "Restart it.",
    "Time to Resolution": "2023-06-01 18:05:38", "Customer Satisfaction Rating": 3.0}, "Resolution")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats(name):
    row, expected = PUBLISHED[name]
    assert detect(row) is None, "it needs no proposal"
    fix, expected = propose_fields(row), expected.split()
    found = {learned([row], proposal)[0] for proposal in (fix, *fix.otherwise)} if fix else set()
    texts = {c: row.get(c, c) for c in expected}   # of a column, or within one
    assert found == {text if isinstance(text, str) else "Hello" for text in texts.values()}


MAIL = [dict(Subject="Slow", Body=f"It is slow, {k}.", Reply=f"Restart it, {k}.") for k in range(4)]


def settings(**more): return load_config("default", **dict(model="tiny", task="chat", eval_samples=0) | more)


def prompts(data): return [data.tokenizer.decode(row["input_ids"]) for row in data.train.tokens]


def test_the_first_rows_may_be_empty():
    rows = [dict(query="", answers=None)] * 3 + [dict(query="1+1?", answers="2")] * 3
    with pytest.raises(SftError) as e: prepare(settings(), train=rows)
    assert e.value.fix.settings == dict(fields=("question=query", "answer=answers"))


@pytest.mark.parametrize("more", [{}, dict(max_samples=2)])
@pytest.mark.parametrize("columns", [("text", "Antwort"), ("Text", "Antwort"), ("Text", "Kategorie")])
def test_a_named_column_that_no_row_has(columns, more):
    rows = [{columns[0]: f"Wo ist Paket {k}?", columns[1]: f"Im Lager {k}."} for k in range(5)]
    with pytest.raises(ConfigError, match="no row has the column Foo for question") as e:
        prepare(settings(fields=("question=Foo", "answer=Bar"), **more), train=rows)
    assert e.value.fix.settings["fields"] == (f"question={columns[0]}", f"answer={columns[1]}")
    assert prepare(settings(**e.value.fix.settings), train=rows).train.n_kept == 5


def test_the_fix_for_a_wrong_column_of_a_table_repeats_no_wrong_column():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame([dict(Vorgang="Wo ist es?", Notiz="Im Lager.", Ort="Bonn")])
    with pytest.raises(SftError, match="there is no column Frage for question") as e:
        prepare(settings(fields=("question=Frage", "answer=Antwort")), train=table)
    assert not e.value.fix.settings and "name one of the columns" in str(e.value.fix)


def test_columns_are_joined():
    joined = prepare(settings(fields=("question=Subject + Body", "answer=Reply")), train=MAIL)
    assert all(f"Slow\n\nIt is slow, {k}." in text for k, text in enumerate(prompts(joined)))
    assert not joined.train.seen.unread
    without = [dict(Body="It is slow.", Reply="Restart it.")]   # a row without one of the two
    data = prepare(settings(fields=("question=Subject + Body", "answer=Reply")), train=[*without, *MAIL])
    assert data.train.n_kept == 5 and "user\nIt is slow." in prompts(data)[0]
    named = [{"Subject + Body": "Slow", "Reply": "Restart it."}]   # a column of that name
    data = prepare(settings(fields=("question=Subject + Body", "answer=Reply")), train=named)
    assert "user\nSlow" in prompts(data)[0]
    with pytest.raises(SftError, match="no.* column Subjekt for question.*did you mean Subject") as e:
        prepare(settings(fields=("question=Subjekt + Body", "answer=Reply")), train=MAIL)
    assert e.value.fix.settings == dict(fields=("question=Subject + Body", "answer=Reply"))


@pytest.mark.parametrize("fields", [
    ("question=Subject,Body", "answer=Reply"), ("question=Subject", "Body", "answer=Reply"),
    ("question=Subject, Body", "answer=Reply"), ("question=Subject+Body", "answer=Reply"),
    ("question={Subject} {Body}", "answer=Reply")])
def test_a_list_of_columns_is_named_as_one(fields):
    with pytest.raises(SftError, match="is a list of columns for question") as e:
        prepare(settings(fields=fields), train=MAIL)
    assert e.value.fix.settings == dict(fields=("question=Subject + Body", "answer=Reply"))
    assert "--fields 'question=Subject + Body' answer=Reply" in e.value.fix.says("shell")


def unread_finding(rows, **more):
    found = prepare(settings(**more), train=rows).report.findings
    return next((f for f in found if f.check == "train_columns"), None)


TEXTS = dict(German=("Text", "Kategorie", "Antwort"), Finnish=("Text", "Luokka", "Vastine"),
             English=("text", "mood", "next"))


@pytest.mark.parametrize("names", TEXTS.values(), ids=TEXTS)
def test_a_second_column_beside_a_text_is_a_warning_with_its_name(names):
    text, few, longer = names
    rows = [{text: f"Nummer {k} ist noch nicht angekommen.", few: "ab"[k % 2],
             longer: f"Wir schicken Nummer {k} morgen."} for k in range(8)]
    found = unread_finding(rows)
    assert found.status == "warn" and few in found.says and longer in found.says
    fields = [fix.settings.get("fields") for fix in (found.fix, *found.fix.otherwise)]
    assert (f"question={text}", f"answer={longer}") in fields
    data = prepare(settings(fields=fields[0]), train=rows)
    assert set(data.train.seen.formats) == {"question_answer"}
    only_few = unread_finding([{text: row[text], few: row[few]} for row in rows])
    assert only_few.fix.settings == dict(fields=(f"question={text}", f"answer={few}"))


def test_a_text_beside_a_question_and_its_answer_is_no_question():
    "simplescaling/s1K: the text is the whole conversation, and holds the answer"
    rows = [dict(question=f"What is {k} + 1? Explain it.", solution=f"We add one and get {k + 1}.",
                 text=f"<|im_start|>user\nWhat is {k} + 1?<|im_end|>\n<|im_start|>assistant\n{k + 1}<|im_end|>")
            for k in range(8)]
    found = unread_finding(rows)
    fixes = [fix.settings for fix in (found.fix, *found.fix.otherwise)]
    assert [f["fields"] for f in fixes if "fields" in f] == [("question=question", "answer=solution")]


@pytest.mark.parametrize("rest", [
    dict(messages=[dict(role="user", content="What is 1?"), dict(role="assistant", content="A number.")]),
    dict(input=[dict(role="user", content="What is 1?")], output="A number.")])
def test_instructions_beside_messages_are_a_system_prompt(rest):
    "As in OpenAI's Responses API"
    rows = [dict(instructions="Be brief and kind.", **rest)] * 8
    fix = unread_finding(rows).fix
    assert fix.settings == dict(fields=("system=instructions",))
    assert set(prepare(settings(**fix.settings), train=rows).train.seen.systems) == {"Be brief and kind."}


def test_columns_beside_a_text_that_are_no_answers():
    rows = [dict(text=f"Oslo {k} is a city in Norway.", source="wiki", lang="en", url=f"https://a.b/{k}", score=.5,
                 title_id=f"x{k}") for k in range(8)]
    assert unread_finding(rows).status == "ok"
    wiki = unread_finding([dict(text=f"Oslo {k} is a city in Norway.", title=f"Oslo {k}") for k in range(8)])
    assert not any("answer=title" in fix.settings.get("fields", ()) for fix in (wiki.fix, *wiki.fix.otherwise))


def test_a_longer_answer_that_is_not_learned_is_proposed():
    rows = [dict(question=f"What is {k}+1?", solution=f"We add one to {k} and get {k + 1}.", answer=str(k + 1),
                 topic="sums") for k in range(8)]
    found = unread_finding(rows)
    assert found.status == "warn" and found.fix.settings == dict(fields=("answer=solution",))
    data = prepare(settings(**found.fix.settings), train=rows)
    assert "We add one to 0 and get 1." in prompts(data)[0]


def test_the_reasoning_of_lists_is_read_by_a_task_that_wants_it():
    rows = [[f"Convert {k} hours to minutes.", 60 * k, f"{k} * 60 = {60 * k}"] for k in range(2, 6)]
    cfg = load_config("default", model="tiny", task="units_rft", eval_samples=0)
    assert "2 * 60 = 120" in prompts(prepare(cfg, train=rows))[0]
    named = load_config(cfg, fields=("question=0", "answer=1", "reasoning=2"))
    assert "2 * 60 = 120" in prompts(prepare(named, train=rows))[0]


@pytest.mark.parametrize("column", ["Complex_CoT", "cot", "thinking_trace", "reasoning"])
def test_a_column_of_reasoning_stands_before_the_only_answer(column):
    rows = [{"Frage": f"Was ist {k} + 1?", column: f"Ich addiere 1 zu {k}.", "Antwort": f"Es ist {k + 1}."}
            for k in range(8)]
    fields = ("question=Frage", "answer=Antwort")
    if column != "reasoning": fields = (*fields, f"reasoning={column}")
    with pytest.raises(SftError) as e: prepare(settings(), train=rows)
    assert e.value.fix.settings == dict(fields=fields)
    with pytest.raises(SftError, match="an answer has reasoning") as e:
        prepare(settings(fields=fields), train=rows)   # tiny's template has no place for it
    data = prepare(settings(fields=fields, reasoning="inline"), train=rows)
    assert "<think>\nIch addiere 1 zu 0.\n</think>\n\nEs ist 1." in prompts(data)[0]
    assert e.value.fix.settings == dict(reasoning="inline")


def test_a_column_of_reasoning_beside_several_answers_or_within_the_answer_is_not_added():
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    assert to_messages(dict(messages=turns * 2, reasoning="why")) == turns * 2
    inline = dict(prompt="a", completion="<think>why</think> b", reasoning="why")
    assert to_messages(inline)[1] == dict(role="assistant", content="<think>why</think> b")


@pytest.mark.parametrize("names", [
    "question passage", "question context", "query documents", "question title", "question hint", "prompt model",
    "question sources evidence", "instruction constraints checklist", "query positive negative", "question explanation",
    "premise hypothesis", "question answer_a answer_b", "Frage Antwort_A Antwort_B", "sentence1 sentence2 label"])
def test_texts_without_an_answer(names):
    assert propose_fields([{name: f"The {name} of row {k}." for name in names.split()} for k in range(6)]) is None


@pytest.mark.parametrize("question, answer, others", [
    ("pergunta", "resposta", "assunto"), ("Domanda", "Risposta", "Fonte"), ("вопрос", "ответ", "источник"),
    ("質問", "回答", "件名"), ("질문", "답변", "제목"), ("السؤال", "الجواب", "المصدر"), ("内容", "回复", "标题"),
    ("Nachricht", "Antwort", "Betreff"), ("Kundenmail", "Antwort", "Betreff"), ("mail", "reply", "subject"),
    ("Mensaje", "Respuesta", "Asunto"), ("body", "reply", "subject"),
    ("source", "target", "id"), ("english", "arabic", "id"), ("task", "reference_solution", "rubric")])
def test_other_languages_and_titles_beside_texts(question, answer, others):
    rows = [{others: f"{k}: short", question: f"What is {k} + 1?", answer: f"It is {k + 1}, of course."}
            for k in range(6)]
    assert propose_fields(rows).settings == dict(fields=(f"question={question}", f"answer={answer}"))


@pytest.mark.parametrize("value", [3, "x", "https://a.b/{}"])
def test_an_unnamed_column_that_holds_no_text_is_no_answer(value):
    assert propose_fields([dict(question=f"What is {k} + 1?", bucket=str(value).format(k)) for k in range(6)]) is None


def test_a_class_whose_values_never_recur_is_what_a_text_is_about():
    rows = [dict(topic=f"the sea in month {k}", essay=f"In month {k} the sea is {k} degrees warm, and few swim in it.")
            for k in range(8)]
    assert propose_fields(rows).settings == dict(fields=("question=topic", "answer=essay"))


@pytest.mark.parametrize("names", ["A B C D", "option_a option_b", "choice1 choice2 choice3"])
def test_choices_that_the_question_lacks_are_a_warning_and_no_answer(names):
    rows = [dict(question=f"What is {k} + 1?", answer="ABCD"[k % 4]) | {c: f"It is {c} {k}." for c in names.split()}
            for k in range(8)]
    found = unread_finding(rows)
    assert found.status == "warn" and f"the question does not show {', '.join(names.split())}" in str(found)
    fixes = (found.fix, *found.fix.otherwise)
    assert "into the question" in str(found.fix) and not any("fields" in fix.settings for fix in fixes)


def test_numbers_of_classes_beside_a_text_are_proposed():
    found = unread_finding([dict(text=f"Film {k} was long.", label=k % 2) for k in range(12)])
    assert found.status == "warn" and found.fix.settings == dict(fields=("question=text", "answer=label"))
    scores = unread_finding([dict(text=f"Film {k} was long.", label=k / 7) for k in range(12)])
    assert not any("fields" in fix.settings for fix in (scores.fix, *scores.fix.otherwise))


def test_a_column_that_answers_messages_is_proposed_where_none_of_them_does():
    rows = [dict(messages=[dict(role="user", content=f"What is {k} + 1?")], solution=f"It is {k + 1}.")
            for k in range(6)]
    with pytest.raises(SftError, match="no row is left to learn from: 6 rows with no answer") as e:
        prepare(settings(), train=rows)
    assert e.value.fix.settings == dict(fields=("prompt=messages", "completion=solution"))
    assert "It is 1." in prompts(prepare(settings(**e.value.fix.settings), train=rows))[0]


def test_rows_without_a_proposal_are_answered_with_the_setting_that_names_columns():
    rows = [dict(Bericht=f"De lamp van rij {k} is stuk.", Terugkoppeling=f"Nummer {k} komt morgen.", Medewerker="Jan")
            for k in range(6)]
    with pytest.raises(SftError, match="name the columns in fields: question=... answer=...") as e:
        prepare(settings(), train=rows)
    assert "a task of your own" in str(e.value)


@pytest.mark.parametrize("value", ["on", "off", "High", "", None, True])
def test_a_column_of_reasoning_may_be_a_switch(value):
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    assert to_messages(dict(messages=turns, reasoning=value)) == turns


def test_reasoning_in_a_column_does_not_join_that_of_the_answer():
    turns = [dict(role="user", content="a"), dict(role="assistant", content="<think>why</think> b")]
    assert to_messages(dict(messages=turns, reasoning="another one")) == turns


def test_the_heading_of_a_text_is_not_what_is_summarised():
    rows = [dict(original_text=f"You agree that clause {k} shall bind you forever.", title=f"section {k}",
                 reference_summary=f"Clause {k} binds you.") for k in range(8)]
    assert propose_fields(rows).settings == dict(fields=("question=original_text", "answer=reference_summary"))
    only = [dict(title=row["title"], summary=row["reference_summary"]) for row in rows]
    assert propose_fields(only).settings == dict(fields=("question=title", "answer=summary"))


@pytest.mark.parametrize("names", ["tekst klasa", "Comentário Sentimento", "レビュー 感情"])
def test_a_task_of_labels_takes_the_column_of_labels_in_any_language(names):
    text, label = names.split()
    rows = [{text: f"This is comment {k}, and it is long.", label: ("good", "bad")[k % 2]} for k in range(12)]
    with pytest.raises(SftError) as e: prepare(settings(task="classify"), train=rows)
    assert e.value.fix.settings == dict(fields=(f"question={text}", f"answer={label}"))
    assert propose_fields(rows) is None or names.endswith("Sentimento")   # other tasks need a name that tells it


@pytest.mark.parametrize("label, values", [("label", (0, 1)), ("category", ("good", "bad"))])
def test_a_text_beside_a_label_is_no_answer_of_a_task_of_labels(label, values):
    rows = [{"text": f"This is comment {k}.", label: values[k % 2]} for k in range(12)]
    found = unread_finding(rows, task="classify")
    assert found.status == "warn" and found.fix.settings == dict(fields=("question=text", f"answer={label}"))


def test_only_columns_that_were_read_are_said_to_be_learned():
    rows = [dict(Vraag=f"What is {k}+{k}?", Antwoord=f"{2 * k}", Moeilijkheid=k % 3) for k in range(12)]
    data = prepare(settings(task="gsm8k", fields=("question=Vraag", "answer=Antwoord")), train=rows)
    assert "Learned: Antwoord, as the answer to Vraag." in str(data)
    rows = [dict(document=f"River {k} is long. It reaches the sea.", summary=f"River {k} is long") for k in range(6)]
    assert "Learned: summary, as the answer to document." in str(prepare(settings(task="summarize"), train=rows))


def test_the_proposal_for_a_wide_table_takes_time_in_proportion_to_its_columns(monkeypatch):
    calls = []
    counted = lambda name, fold_case=readers.fold_case: calls.append(name) or fold_case(name)
    for module in (proposals, readers): monkeypatch.setattr(module, "fold_case", counted)
    def count(n:int)->int:
        calls.clear()
        proposals.propose_reading([{f"c{i}": "x" for i in range(n)}])
        return len(calls)
    assert count(200) < 2.5 * count(100)


def test_the_name_of_a_person_is_no_answer():
    "A column `agent` may hold what an agent writes, or who it is"
    rows = [dict(question=f"Where is parcel {k}?", answer=f"It is in van {k}.") for k in range(12)]
    named = unread_finding([row | dict(agent=("k.meyer", "s.ojo")[k % 2], csat=k % 5) for k, row in enumerate(rows)])
    assert "csat is not used" in str(named) and "answer=agent" not in str(named)


def test_a_name_inside_an_object_is_proposed_with_its_path():
    row = dict(id="7", translation=dict(de="Guten Tag, Welt.", en="Good day, world."))
    with pytest.raises(SftError, match="did you mean translation.de") as e:
        prepare(load_config(task="translate", fields=dict(source="de", target="en"), eval_samples=0), train=[row] * 3)
    assert e.value.fix.settings == dict(fields=("source=translation.de", "target=translation.en"))
