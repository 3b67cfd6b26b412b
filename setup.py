"Everything here is read from settings.ini."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
FOR_USERS = ("lab", "track", "deepspeed", "flash", "hybrid", "prove", "smollm2", "excel", "search")
extras = {name: cfg[f"{name}_requirements"].split() for name in ("dev", "docs", *FOR_USERS)}
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
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    url=cfg["git_url"],
    project_urls={
        "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
        "Source": cfg["git_url"],
        "Issues": cfg["git_url"] + "/issues",
        "Changelog": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md",
    },
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
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in ("3", "3.11", "3.12", "3.13")),   # as in CI
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
