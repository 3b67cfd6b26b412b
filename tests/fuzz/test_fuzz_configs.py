"Configs of other tools with odd values, and as damaged text: read, or refused in a sentence"
import random

import pytest
import yaml
from fuzzing import corpus, ends_well, mutate, SEED
from systems.test_foreign_configs import ENTRIES, MEANS

from sft_nb.config.load import load_config
from sft_nb.extras.other_tools import foreign_keys

KEYS = sorted({name.split(" (")[0] for name, _ in foreign_keys()})
FILES = list(dict.fromkeys(f"{file}{more}\n" for file, more, _ in MEANS))
LINES = ["\t- x", "a: &a [*a]", "? [a]", "!!python/object/apply:os.system ['touch x']", "lr: 1e-4\nlr: 2",
         "<<: *x", "key: 'open", "'\x1b[31m': 1", "a: &a {b: 1}\nc: {<<: *a}", "2024-01-01: x", "lora_r: 0x10", "- x",
         "%YAML 9.9", "---\nb: 1", "model: !!binary aGVsbG8=", "x: .nan\ny: .inf", "\ufeffa: 1", "datasets: *x"]


def read(tmp_path, text:str):
    file = tmp_path/"theirs.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return ends_well(lambda: load_config(file), tmp_path)


@pytest.mark.parametrize("part", range(8))
def test_values(tmp_path, part):
    r = random.Random(f"{SEED} {part}")
    for file in r.sample(FILES, 30):
        given = yaml.safe_load(file)
        if r.random() < .3: given["datasets"] = [r.choice(ENTRIES)[0]]
        changed = mutate(r, given | {r.choice(KEYS): r.choice([1, "x", True, None, [1], {"a": 1}])}, words=KEYS)
        read(tmp_path, yaml.safe_dump(changed, allow_unicode=r.random() < .5))


def test_text(tmp_path):
    r = random.Random(SEED)
    for file in r.sample(FILES, 30):
        lines = file.splitlines()
        lines.insert(r.randrange(len(lines) + 1), r.choice(LINES))
        text = "\n".join(lines)
        if r.random() < .3: text = text[:r.randrange(len(text))]
        if r.random() < .3: text = text.replace(r.choice(" :-[{"), r.choice(["", "\t", "::", "}"]), 1)
        read(tmp_path, text)


@pytest.mark.parametrize("kept", corpus("configs"), ids=lambda x: x["name"])
def test_configs_that_once_failed(tmp_path, kept): read(tmp_path, kept["text"])
