"""The product's own files and what they define, for tests that judge all of them."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("telescope", "launch")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def product_files(root: Path = ROOT) -> Iterator[Path]:
    """Each once: symbolic links are not followed."""
    for name in (name for name in PRODUCT if not (root / name).is_symlink()):
        for folder, _, files in sorted(os.walk(root / name)):
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def load_script(path: Path) -> ModuleType:
    """A file that no package has, such as one of scripts/, as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def definitions(tree: ast.AST, outer: Sequence[str] = ()) -> Iterator[tuple[str, Definition]]:
    """(dotted name, node) of every class and function, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        inner = outer
        if isinstance(node, Definition):
            inner = (*outer, node.name)
            yield ".".join(inner), node
        yield from definitions(node, inner)
