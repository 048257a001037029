from __future__ import annotations

import json
import re
from pathlib import Path

from tests.bench.systems.edge import Route, configuration, in_words_of_2_8

ROUTE = Route("echo", "/echo", port=8080, probe_port=9100, addresses=["127.0.0.2:8080", "127.0.0.3:8080"])


def test_it_is_the_controllers_configuration_on_this_host() -> None:
    text = configuration(ROUTE, 18000, Path("/tmp/ph-x"))
    assert "    bind 127.0.0.1:18000\n" in text
    assert re.search(r"server echo-1 127\.0\.0\.2:8080 id 1 check .*port 9100.* maxconn 1000", text)
    assert re.search(r"server echo-2 127\.0\.0\.3:8080 id 2 ", text)
    for of_the_image in ("/run/haproxy", "/usr/local/etc", "bind :", "user haproxy", "group haproxy"):
        assert of_the_image not in text


def test_the_access_log_of_an_older_haproxy_has_the_same_fields() -> None:
    text = configuration(ROUTE, 18000, Path("/tmp/ph-x"))
    older = in_words_of_2_8(text)
    assert "thread-hard-limit" not in older
    wanted = re.findall(r"%\((\w+)(?::sint)?\)", re.findall(r"log-format '(.*)'", text)[0])
    (line, *_) = re.findall(r"log-format '(.*)'", older)
    filled = json.loads(re.sub(r"%\[[^\]]*\]|%\w+", "0", line))
    assert list(filled) == wanted
    assert filled["status"] == 0
    assert filled["replica"] == "0"
