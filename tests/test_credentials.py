"""Keys: from which files they are read, and that no file or log line contains one."""
import base64
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from urllib.parse import quote

import pytest

from sft_nb.base import credentials
from sft_nb.base.credentials import load_env_files, redact, redact_json, RedactingStream
from sft_nb.base.report import Report, fail


@pytest.fixture
def folders(tmp_path, monkeypatch):
    "A home folder and a separate project as working folder; no key is set"
    for name in [n for n in os.environ if credentials.is_allowed_in_env_file(n)]: monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    monkeypatch.setattr(credentials, "_WARNED", set())
    monkeypatch.setattr(credentials, "_FROM_FILES", {})
    for folder in ("home", "above/project"): (tmp_path/folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path/"above/project")
    before = dict(os.environ)
    yield tmp_path
    for name in set(os.environ) - set(before): del os.environ[name]


def put(folder:Path, text:str, mode:int=0o600)->Path:
    (folder/".env").write_text(text)
    (folder/".env").chmod(mode)
    return folder/".env"


def read()->set[str]:
    "The variables that `load_env_files` sets"
    before = dict(os.environ)
    load_env_files()
    return {name for name in os.environ if os.environ[name] != before.get(name)}


def test_working_folder_and_home_are_read_and_said_once(folders, capsys):
    put(folders/"above/project", "HF_TOKEN=of-the-project\n")
    put(folders/"home", "HF_TOKEN=of-my-home\nWANDB_API_KEY=of-my-home\nTRACKIO_SPACE_ID=me/x\n")
    assert read() == {"HF_TOKEN", "WANDB_API_KEY", "TRACKIO_SPACE_ID"} and os.environ["HF_TOKEN"] == "of-the-project"
    said = capsys.readouterr()
    assert "HF_TOKEN read from" in said.err and "of-my-home" not in said.err and said.out == ""
    assert read() == set() and capsys.readouterr().err == ""


def test_what_stands_above_the_working_folder_is_not_read(folders, capsys):
    put(folders/"above", "HF_TOKEN=of-a-stranger\n")
    assert read() == set() and capsys.readouterr().err == ""


NEVER = ("HF_ENDPOINT PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD PATH HTTP_PROXY https_proxy ALL_PROXY WANDB_BASE_URL "
         "TRACKIO_SERVER_URL TRACKIO_DIR PYTHONSTARTUP HF_HOME HF_HUB_OFFLINE REQUESTS_CA_BUNDLE BASH_ENV "
         "SFT_NB_CACHE CUDA_VISIBLE_DEVICES AWS_SECRET_ACCESS_KEY").split()


@pytest.mark.parametrize("name", NEVER)
def test_what_is_no_key_is_never_read(folders, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = os.environ.get(name)
    put(folders/"above/project", f"{name}=/tmp/evil\nexport {name}=/tmp/evil\n")
    load_env_files()
    assert os.environ.get(name) == before


def test_what_is_left_in_a_file_is_said(folders, capsys):
    put(folders/"above/project", "HF_ENDPOINT=https://evil.example\n")
    assert read() == set() and "HF_ENDPOINT in" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o622, 0o660, 0o666, 0o602])
def test_a_file_that_others_may_write_is_not_read(folders, capsys, mode):
    file = put(folders/"above/project", "HF_TOKEN=of-anybody\n", mode)
    assert read() == set() and f"{file} is not read: others can write to it. Fix: " in capsys.readouterr().err


def test_a_file_of_another_user_is_not_read(folders, capsys, monkeypatch):
    put(folders/"above/project", "HF_TOKEN=of-a-stranger\n")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert read() == set() and "it belongs to another user" in capsys.readouterr().err


def test_a_link_is_judged_by_what_it_leads_to(folders, capsys):
    target = put(folders/"home", "HF_TOKEN=of-anybody\n", 0o666)
    Path(".env").symlink_to(target)
    assert read() == set() and "others can write to it" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_is_no_file(folders, make):
    make(".env")
    assert read() == set()


def test_nothing_is_put_in_from_the_environment(folders, monkeypatch):
    monkeypatch.setenv("AWS_SECRET", "a-secret-of-mine")
    put(folders/"above/project", "WANDB_PROJECT=${AWS_SECRET}\n")
    load_env_files()
    assert os.environ["WANDB_PROJECT"] == "${AWS_SECRET}"


SECRET = 'p"a\\s/wört é\'s 100%'
FORMS = [SECRET, json.dumps(SECRET), json.dumps(SECRET, ensure_ascii=False), repr(SECRET), quote(SECRET, safe=""),
         f"{SECRET.encode()!r}", json.dumps(json.dumps(dict(p=SECRET))), base64.b64encode(SECRET.encode()).decode()]


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_redacted_in_any_form(monkeypatch, form):
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    assert redact(f"before {form} after") != f"before {form} after" and "wört" not in redact(form)
    assert "<MY_PASSWORD>" in redact(form)


SHAPES = ["hf_" + "aB3" * 8, "ghp_" + "a1" * 18, "sk-proj-" + "Ab1-" * 8, "AKIA" + "A2B3" * 4, "xoxb-1234567890-abc",
          "glpat-" + "a1" * 10, "AIza" + "a1B" * 11, "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM"]


@pytest.mark.parametrize("token", SHAPES)
def test_a_token_is_known_by_its_shape(token):
    assert redact(f"401 for {token}: go") == "401 for <token>: go" and token not in redact(f"x={token}")


@pytest.mark.parametrize("text, left", [
    ("http://me:hunter2@host:80/x", "http://me:<password>@host:80/x"),
    ("postgres://me:a@b@host", "postgres://me:<password>@host"),
    ("https://h/x?a=1&access_token=abc&n=2", "https://h/x?a=1&access_token=<secret>&n=2"),
    ("Authorization: Bearer abcdefgh12", "Authorization: Bearer <token>"),
    ("to https://hooks.slack.com/services/T0AB/B0CD/xYz123abc now", "to https://hooks.slack.com/services/<secret> now"),
    ("https://discord.com/api/webhooks/123456/aBc-d_e", "https://discord.com/api/webhooks/123456/<secret>"),
    ("https://acme.webhook.office.com/webhookb2/1-2@3/IncomingWebhook/x",
     "https://acme.webhook.office.com/webhookb2/<secret>"),
    ("https://api.telegram.org/bot12:AbC/send", "https://api.telegram.org/bot<secret>"),
    (f"https://{'0a' * 16}@o1.ingest.sentry.io/2", "https://<key>@o1.ingest.sentry.io/2"),
    ("Server=db;Uid=me;Pwd=hun2;Database=x", "Server=db;Uid=me;Pwd=<password>;Database=x"),
    ("Password=hun2;Server=db", "Password=<password>;Server=db"),
    ("AccountName=a;AccountKey=Zm9v/w==;End=x", "AccountName=a;AccountKey=<password>;End=x"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----!", "<private key>!"),
])
def test_a_password_in_a_url_or_a_header(text, left, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")   # it holds the text
    assert redact(text) == left


@pytest.mark.parametrize("text", [
    "http://localhost:8888/lab?x=1", "1f0e3dad99908345f7439f8ffabdffc4f00dbabe", "runs/sk-demo-1: step 40 of 100",
    "Password: what you typed", "getpass(password=password); print(1)", "pwd=/home/me", "the pass = 3 of 4", "hf_hub",
    "step 40; loss = 1.2; lr = 1e-4", "https://hooks.example.com/services/1", "https://slack.com/help",
    "https://discord.com/api/docs", '{"password": "required", "tokens": 512}', "a key=value; pair", "sk-learn",
    "mail me@example.com", "a ratio of 3:4 @ noon", "https://github.com/me/repo", "<|im_start|>user\nHi<|im_end|>",
])
def test_what_is_no_secret_stays(text): assert redact(text) == text


def test_short_values_and_passwords_of_connection_strings(monkeypatch):
    "a short one stands alone and is no word; an ordinary word or number is too common to be looked for"
    monkeypatch.setenv("MY_PASSWORD", "aB3!")
    monkeypatch.setenv("DB", "Server=x;Uid=me;Pwd=open-sesame;")
    for common in ("SOME_TOKEN=test", "SOME_KEY=1234", "A_SECRET=1.5", "B_SECRET=Yes", "C_SECRET=ab"):
        monkeypatch.setenv(*common.split("="))
    assert redact("401 for aB3! and open-sesame") == "401 for <MY_PASSWORD> and <DB>"
    kept = "a test of 1234 rows, loss 1.5, Yes, ab, xaB3!y"
    assert redact(kept) == kept


def test_a_setting_that_is_a_secret_by_its_name(tmp_path):
    "a value of no known shape; settings of other programs are displayed as they were given"
    from sft_nb.config.load import load_config, save_config
    from sft_nb.base.report import ConfigError
    given = dict(hub_token="open-sesame", comet_api_key="open-sesame", dataset_kwargs=dict(password=["open-sesame"]))
    cfg = load_config(model="tiny", **given, eos_token="</s>", train_tokens=("<|a|>",))
    saved = save_config(cfg, tmp_path/"config.json").read_text()
    assert "open-sesame" not in saved + repr(cfg) + cfg._repr_html_() and repr(cfg).count("<secret>") == 3
    assert "eos_token = '</s>'" in repr(cfg) and cfg.train_tokens == ("<|a|>",)
    assert load_config(tmp_path/"config.json") == cfg
    with pytest.raises(ConfigError) as e: load_config(model_init_kwargs=dict(token="open-sesame"))
    assert "open-sesame" not in str(e.value)


def test_a_secret_in_pieces(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "correct-horse")
    token, log = "hf_" + "aB3" * 8, StringIO()
    stream = RedactingStream(log)
    for text in (f"x {token} y, with correct-horse, the end\n", "no-secret here\n"):
        for size in (1, 2, 5, 9):
            for k in range(0, len(text), size):
                stream.write(text[k:k + size])
                stream.flush()
    assert log.getvalue() == ("x <token> y, with <MY_PASSWORD>, the end\n" * 4 + "no-secret here\n" * 4)
    stream.write("a question? hf_")
    stream.flush()
    assert log.getvalue().endswith("a question? ")
    stream.write_rest()
    assert log.getvalue().endswith("a question? hf_")


def test_a_password_of_a_url_in_the_environment_is_one_also_alone(monkeypatch):
    monkeypatch.setenv("DATABASE", "postgres://me:open-sesame@host/x")
    assert redact("no entry with open-sesame") == "no entry with <DATABASE>"


def test_our_own_fields_are_no_free_text(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_TOKEN", "finished")
    monkeypatch.setenv("MY_API_KEY", "learning")
    said = dict(state="finished", reason="was finished", steps=[1, 2.5, None, True])
    assert redact_json(said) == said | dict(reason="was <JUPYTER_TOKEN>")
    report = Report("t", findings=[fail("401 for learning", "not learning", check="learning")])
    again = Report.load(report.save(tmp_path/"x.json"))
    finding = again.findings[0]
    assert finding.check == "learning" and "learning" not in finding.says + str(finding.fix)


def test_a_status_is_not_corrupted(tmp_path, monkeypatch):
    from sft_nb.config.load import load_config
    from sft_nb.runs.directory import create_run
    monkeypatch.setenv("JUPYTER_TOKEN", "finished")
    monkeypatch.setenv("SOME_KEY", "run_name")
    run = create_run(load_config(runs_dir=str(tmp_path), run_name="x"))
    run.set_status("finished", reason="finished at https://me:hunter2@hub", step=3)
    assert run.state == "finished" and run.config.run_name == "x" and "hunter2" not in run.status.reason


def test_the_command_line_prints_no_secret(tmp_path):
    code = "import sys; from sft_nb.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "evaluate", "very-secret-word/hf_" + "a1B2" * 6], text=True,
                          capture_output=True, env=os.environ | dict(MY_TOKEN="very-secret-word"), cwd=tmp_path)
    assert done.returncode == 2 and "<MY_TOKEN>/<token>" in done.stderr and "secret-word" not in done.stderr


def test_a_secret_that_a_variable_names_is_not_written_into_a_run(tmp_path, monkeypatch):
    "a value of no known shape, in a setting whose name says nothing"
    from sft_nb.config.load import load_config
    from sft_nb.base.report import ConfigError
    from sft_nb.runs.directory import create_run
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct-horse-1")
    monkeypatch.setenv("SORT_KEY", "arithmetic-x")
    cfg = load_config("demo", runs_dir=str(tmp_path/"runs"), system_prompt="Log in with correct-horse-1.")
    with pytest.raises(ConfigError, match="system_prompt: the secret of .MY_SERVICE_PASSWORD is in it") as e:
        create_run(cfg)
    assert "correct-horse" not in str(e.value) and not (tmp_path/"runs").exists()
    create_run(load_config(cfg, system_prompt="arithmetic-x"))   # a word


@pytest.mark.parametrize("prompt", ["Server=db;Pwd=geheim; be brief", "post to https://hooks.slack.com/services/T0/B0/x1y2z3"])
def test_a_prompt_with_something_like_a_secret_is_refused(tmp_path, prompt):
    "config.json would keep another prompt than the one that is trained, and evaluation and resuming read it there"
    from sft_nb.config.load import load_config
    from sft_nb.base.report import ConfigError
    from sft_nb.runs.directory import create_run
    with pytest.raises(ConfigError, match="system_prompt: it seems to contain a secret") as e:
        create_run(load_config("demo", system_prompt=prompt, runs_dir=str(tmp_path)))
    assert "geheim" not in str(e.value) and "x1y2z3" not in str(e.value) and not list(tmp_path.iterdir())
