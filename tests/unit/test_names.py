"""The name of a class means one thing, wherever it stands."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.harness.imports import ROOT, modules_of

TWICE = {
    "HAProxyProcess": "the process, and its record in the API",
    "JsonFormatter": "log lines of the controller, and those of a replica",
    "LLMConfig": "x-serve.llm, and Ray Serve LLM's object for it",
    "LLMServer": "the server, and the same as a deployment of Ray Serve's",
    "Mark": "the operator's mark of a GPU, and its record in the API",
    "NotYet": "the controller's error, and what the command makes of it",
    "Service": "the public base of classes, and the API's record",
    "Settings": "those of the controller, and those of a replica",
    "SettingsError": "the error of each of these settings",
}
"""Names of classes that stand at the top of two modules, each with the reason."""


def test_names_of_classes_mean_one_thing() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    packages = {
        "controller": ROOT / "controller",
        "pierhead": ROOT / "services" / "runtime" / "pierhead",
        "llm": ROOT / "services" / "llm",
    }
    for package, folder in packages.items():
        for module, path in modules_of(folder, package).items():
            if "_pb2" not in module:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        found[node.name].add(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1}.keys() <= TWICE.keys()
