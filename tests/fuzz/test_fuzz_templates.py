"Chat templates from a grammar of Jinja: conversations are rendered and masked, or refused in a sentence"
import pytest
from fuzzing import corpus, ends_well, SEED
from hypothesis import example, given, HealthCheck, seed, settings as how, strategies as st
from rows.test_published import ANSWER, TOOL, USER, with_number

from sft_nb.config.load import load_config
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer

SYSTEM = dict(role="system", content="Be brief.")
CALL = dict(role="assistant", content="", tool_calls=[dict(id="1", type="function", function=dict(
    name="weather", arguments=dict(city="Oslo")))])
ROWS = [with_number(row, k) for k, row in enumerate([
    dict(messages=[USER, ANSWER]), dict(messages=[SYSTEM, USER, ANSWER, USER, ANSWER]),
    dict(prompt="a?", completion="b"),
    dict(messages=[USER, CALL, dict(role="tool", content="4 C", tool_call_id="1"), ANSWER], tools=[TOOL]),
    dict(messages=[USER, ANSWER | dict(reasoning_content="Hm.")])])]

VALUES = st.sampled_from([
    "message.content", "message['role']", "messages[0]", "messages[-1].content", "bos_token", "eos_token", "message",
    "loop.index0", "add_generation_prompt", "tools", "message.tool_calls", "message.reasoning_content", "nothing",
    "nothing.at.all", "'<|im_start|>'", "'\\n'", "1", "none", "namespace(a=1)", "range(3)", "messages",
    "strftime_now('%Y')"])
FILTERS = st.sampled_from(["trim", "upper", "length", "tojson", "first", "last", "list", "string", "int", "reverse",
                           "default('x')", "join(',')", "items", "selectattr('role', 'equalto', 'user')", "no_such"])
TESTS = st.sampled_from(["defined", "none", "string", "mapping", "not defined", "odd", "no_such"])
expressions = st.recursive(VALUES, lambda inner: st.one_of(
    st.builds("{} | {}".format, inner, FILTERS), st.builds("({} {} {})".format, inner, st.sampled_from(
        ["+", "~", "==", "!=", "and", "or", "in", "-", "%", "/"]), inner),
    st.builds("{} is {}".format, inner, TESTS), st.builds("({} if {} else {})".format, inner, inner, inner),
    st.builds("{}[{}]".format, inner, inner), st.builds("{}.split('a')".format, inner)), max_leaves=4)
TEXTS = st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "user", "assistant\n", "<think>\n\n</think>\n\n",
                         "\x1b[31m", "</s>", "é", "{{ eos_token }}", "{{ message.content }}", "{{ message.role }}",
                         "{#- note -#}"])


def blocks(inner):
    body = st.lists(inner, max_size=4).map("".join)
    return st.one_of(
        st.builds("{{{{ {} }}}}".format, expressions), st.builds("{{%- set x = {} %}}".format, expressions),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, expressions, body, body),
        st.builds("{{% for message in messages %}}{}{{% endfor %}}".format, body),
        st.builds("{{%- for x in {} %}}{}{{%- endfor %}}".format, expressions, body),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, body),
        st.builds("{{% macro m(x) %}}{}{{% endmacro %}}{{{{ m({}) }}}}".format, body, expressions),
        st.builds("{{{{ raise_exception({}) }}}}".format, expressions))


pieces = st.recursive(TEXTS, blocks, max_leaves=8)
bodies = st.lists(pieces, min_size=1, max_size=5).map("".join)
sound = bodies.map(lambda body: (   # each message is written, with something odd around
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" + body
    + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"))
damaged = st.builds(lambda text, k, junk: text[:k] + junk + text[k + 1:], bodies, st.integers(0, 200), st.sampled_from(
    ["", "{%", "}}", "{{", "%}", "{% endfor %}", "{% break %}", "{% include 'x' %}", "{% import 'os' as o %}", "\0"]))
templates = st.one_of(sound, bodies, damaged).map(lambda text: "{#- a template -#}{%- set y = 1 %}" + text)
relaxed = how(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def read(folder, template:str):
    def render():
        cfg = load_config("default", model="tiny", chat_template=template, train_file="rows.jsonl", eval_samples=0,
                          on_bad_row="drop", max_length=512)
        return prepare(cfg, load_tokenizer(cfg), train=ROWS)
    return ends_well(render, folder)


def with_kept(test):
    for kept in corpus("templates"): test = example(template=kept["text"])(test)
    return test


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("templates")


@with_kept
@seed(int(SEED))
@given(template=templates)
@relaxed
def test_templates(folder, template): read(folder, template)


@pytest.mark.parametrize("content", [b"\xff\xfe{{ x }}", b"", b"{{" * 20_000, b"{% for x in y %}"], ids=repr)
def test_files_with_a_template(folder, content):
    file = folder/"mine.jinja"
    file.write_bytes(content)
    read(folder, str(file))
