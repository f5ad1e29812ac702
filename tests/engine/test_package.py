"""The package as its users meet it: what it imports, what it names, what it says."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import typing
from pathlib import Path

import attrs
import pytest

import ninfer

HEAVY = (
    "numba", "torch", "cupy", "xgrammar", "transformers", "tokenizers", "jinja2", "tqdm", "PIL",
    "ninfer.constraints.output", "ninfer.frontend", "ninfer.artifact", "ninfer.program", "ninfer.models",
)  # fmt: skip
CLASSES = [getattr(ninfer, name) for name in ninfer.__all__ if inspect.isclass(getattr(ninfer, name))]


def test_importing_is_light():
    code = f"import ninfer, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_nothing_is_compiled_beforehand():
    """No extension of ours that could miss a library: kernels are compiled where they run."""
    files = [path.suffix for path in Path(ninfer.__file__).parent.rglob("*") if path.is_file()]
    assert ".py" in files
    assert not {".so", ".pyd", ".dylib", ".o", ".a"} & set(files)


def test_every_public_name_exists():
    assert len(set(ninfer.__all__)) == len(ninfer.__all__)
    for name in ninfer.__all__:
        assert getattr(ninfer, name) is not None
    with pytest.raises(AttributeError, match="Motor"):
        ninfer.Motor  # noqa: B018


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_class_is_documented(cls):
    assert inspect.getdoc(cls)
    assert cls.__doc__, f"{cls.__name__} has no docstring of its own"
    for name, member in _members(cls):
        assert inspect.getdoc(member), f"{cls.__name__}.{name}"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_class_is_typed(cls):
    if attrs.has(cls):
        assert all(field.type is not None for field in attrs.fields(cls))
    for name, member in _members(cls):
        function = member.fget if isinstance(member, property) else member
        annotations = function.__annotations__
        assert "return" in annotations, f"{cls.__name__}.{name}"
        parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        assert set(parameters) <= set(annotations), f"{cls.__name__}.{name}"


def _members(cls):
    """Public methods and properties defined by the class itself."""
    for name, member in vars(cls).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(plain, property)):
            yield name, plain


def test_errors_have_one_root():
    errors = [cls for cls in CLASSES if issubclass(cls, BaseException)]
    assert len(errors) > 10
    assert all(issubclass(cls, ninfer.NinferError) for cls in errors)


def test_options_and_results_are_frozen():
    for value in (ninfer.EngineOptions(), ninfer.RequestOptions(), ninfer.SamplingParams(), ninfer.GenerationResult()):
        name = attrs.fields(type(value))[0].name
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(value, name, None)


def test_the_logger_is_silent_by_default():
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("ninfer").handlers)


def test_the_package_says_it_is_typed():
    from importlib.resources import files

    assert files("ninfer").joinpath("py.typed").is_file()
    assert typing.get_type_hints(ninfer.GenerationResult)
