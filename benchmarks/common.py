"""What the benchmarks share: real rows, a real tokenizer with a real chat template, medians, and a file of results."""
import json, os, platform, resource, statistics, time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE/"results"
SHARED = Path(os.environ.get("SFT_NB_SHARED", HERE.parent.parent/"shared"))


def processor()->str:
    "The CPU's name where Linux tells it"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def shared(path:str)->Path:
    "A real file, or the end with the reason"
    if not (SHARED/path).exists():
        fix = "set SFT_NB_SHARED to the folder of real rows and tokenizers"
        raise SystemExit(f"{SHARED/path} is not here. Fix: {fix}.")
    return SHARED/path


def template(name:str)->Path:
    "A chat template that trl ships"
    import trl
    return Path(trl.__file__).parent/"chat_templates"/name


def alternating(jobs:dict, *, times:int=5)->dict[str,list[float]]:
    "Seconds of each job, run in turns so that a slow minute of the machine meets all of them; each is warmed up once"
    for job in jobs.values(): job()
    seconds = {name: [] for name in jobs}
    for _ in range(times):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def median_rate(n:int, seconds:list[float])->float: return n / statistics.median(seconds)


def resident_mib()->float:
    "Most memory that this process held; on Linux not what getrusage says, which begins with the parent's"
    status = Path("/proc/self/status")
    if not status.exists(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    high = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(high.split()[1]) / 1024


def save(name:str, device:str="cpu", **result)->dict:
    "Write benchmarks/results/NAME.json with date, processor and versions"
    from sft_nb.runs.status import environment
    facts = {k: v for k, v in environment(device).items() if k in ("python", "cpus", "packages")}
    result = dict(benchmark=name, date=time.strftime("%Y-%m-%d"), processor=processor(), **facts, **result)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS/f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
