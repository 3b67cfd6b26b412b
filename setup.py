"Everything here is read from settings.ini."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
FOR_USERS = ("lab", "eval", "track", "deepspeed", "flash", "fast", "hybrid", "prove", "smollm2", "excel", "search")
extras = {name: cfg[f"{name}_requirements"].split() for name in ("dev", *FOR_USERS)}
extras["all"] = sorted({r for name in FOR_USERS for r in extras[name]})


def readme():
    "The README for a package index, which has no files beside it: links and pictures by their whole address"
    text = (here / "README.md").read_text(encoding="utf-8")
    raw = cfg["git_url"].replace("github.com", "raw.githubusercontent.com") + "/" + cfg["branch"]
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{raw}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{cfg['git_url']}/blob/{cfg['branch']}/", text)


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme(),
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"]},
    package_dir={"": "."},   # an editable install is then a path, which editors follow, and no hook of the import
    packages=find_packages(include=["sft_nb", "sft_nb.*"]),
    package_data={"sft_nb": ["assets/**/*", "configs/*.py", "extras/tools/**/*.toml", "**/*.pyi", "py.typed"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],   # names in the docs become links to their source
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Framework :: Jupyter",
        "Intended Audience :: Developers",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
