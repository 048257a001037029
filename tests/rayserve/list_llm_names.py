"""Prints the public names of Ray Serve LLM: `python list_llm_names.py SITE_PACKAGES >ray_serve_llm_names.txt`.

Read from its source, as it cannot be imported without vLLM. What is public in the modules of ray.serve.llm; parameters
of the builders; fields and methods of the configuration's classes, of servers and of the ingress.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

OF_CLASSES = {
    "LLMConfig": "core/configs/llm_config.py",
    "LoraConfig": "core/configs/llm_config.py",
    "ModelLoadingConfig": "core/configs/llm_config.py",
    "LLMServingArgs": "core/ingress/builder.py",
    "LLMServer": "core/server/llm_server.py",
    "ingress.OpenAiIngress": "core/ingress/ingress.py",
}
"""Public classes that have nothing but a base, and where that is."""


def main(packages: Path) -> None:
    public, internal = packages / "ray" / "serve" / "llm", packages / "ray" / "llm" / "_internal" / "serve"
    names = set(_of_modules(public))
    for name, file in OF_CLASSES.items():
        tree = ast.parse((internal / file).read_text(encoding="utf-8"))
        [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name.rpartition(".")[2]]
        names |= {f"{name}.{member}" for member in _members(cls)}
    names |= {f"LLMConfig.{name}" for name in ("from_file", "parse_yaml")}
    print("\n".join(f"ray.serve.llm.{name}" for name in sorted(names)))


def _of_modules(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.py"):
        prefix = "" if path.stem == "__init__" else f"{path.stem}."
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.decorator_list:
                yield prefix + node.name
                if isinstance(node, ast.FunctionDef):
                    for each in (*node.args.args, *node.args.kwonlyargs):
                        yield f"{prefix}{node.name}({each.arg})"
            elif (
                isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0] != "_"
            ):
                yield prefix + node.targets[0].id
            elif isinstance(node, ast.ImportFrom) and path.stem == "ingress":
                yield from (prefix + each.name for each in node.names if each.name == "make_fastapi_ingress")
    yield "LLMServer"


def _members(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("validator" in ast.unparse(each) for each in node.decorator_list):
                continue
            name = node.name
        else:
            continue
        if not name.startswith("_"):
            yield name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
