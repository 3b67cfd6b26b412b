"""Fail if `nbdev_export`, `nbdev_clean`, or the generators of the README and the stubs, would change a committed file,
or git ignores one."""
import subprocess, sys
from pathlib import Path

root, tools = Path(__file__).parents[1], Path(sys.executable).parent


def files():
    "Path -> bytes of every generated file"
    found = [p for folder in ("nbs", "sft_nb") for p in (root/folder).rglob("*")]
    found = [p for p in found if p.suffix in (".py", ".pyi", ".ipynb")]
    found = [p for p in found if ".ipynb_checkpoints" not in p.parts]
    return {p.relative_to(root): p.read_bytes() for p in [*found, root/"README.md", root/"pyproject.toml"]}


def main():
    before = files()
    scripts = [[sys.executable, root/"scripts"/name] for name in ("stubs.py", "readme.py")]
    for command in ([tools/"nbdev_export"], [tools/"nbdev_clean"], *scripts):
        subprocess.run([str(c) for c in command], check=True, cwd=root)
    after = files()
    changed = sorted(str(p) for p in {*before, *after} if before.get(p) != after.get(p))
    if changed:
        fix = "make sure the notebooks are what you mean, and commit these files as they are now"
        sys.exit(f"The notebooks make something other than what is there: {', '.join(changed)}.\nFix: {fix}.")
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "sft_nb/*.py*", "nbs/*.ipynb"]
    ignored = subprocess.run(listing, capture_output=True, text=True, cwd=root).stdout.split()
    if left := [name for name in ignored if Path(name) in after]:
        sys.exit(f".gitignore leaves out what the notebooks make: {', '.join(left)}.\nFix: an exception in .gitignore.")
    print(f"{len(after)} files are what the notebooks make")


if __name__ == "__main__": main()
