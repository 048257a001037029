"""What the wheel carries of the stack, in addition to packages: files and directories of the clone.

proto/hatch_build.py reads it as well, so it imports nothing.
"""

FILES = (
    *(".dockerignore", "LICENSE", "README.md", "pyproject.toml", "uv.lock"),
    *("compose/compose.yaml", "compose/images.yaml", "compose/reference.yaml", "compose/swarm.yaml"),
    *("compose/tls.yaml", "compose/acme.yaml", "compose/alerts.yaml"),
    *("compose/x-serve.schema.json", "compose/python", "compose/registry", "compose/wheels"),
    *("controller", "dashboards/alertmanager", "dashboards/grafana", "dashboards/prometheus", "haproxy", "simulator"),
    *("proto/hatch_build.py", "services/llm", "services/runtime/README.md", "services/runtime/pyproject.toml"),
    *(f"compose/machine/{name}.sh" for name in ("base-images", "engine", "host", "messages")),
    "compose/machine/no-ca.pem",
)
