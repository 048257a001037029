from __future__ import annotations

import pytest
from pierhead import Settings
from pierhead.errors import SettingsError


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings(replica=settings.replica, static={})
    assert settings.replica, "a replica always has a name: the container's"


def test_what_the_controller_gives_is_read() -> None:
    settings = Settings.from_env(
        {
            "PIERHEAD_SERVICE": "ranker",
            "PIERHEAD_REPLICA": "p-ranker-abcd1234-1",
            "PIERHEAD_PORT": "50051",
            "PIERHEAD_ADMIN_PORT": "9100",
            "PIERHEAD_DISCOVERY": "controller:8101",
            "PIERHEAD_MAX_ONGOING_REQUESTS": "1000",
            "PIERHEAD_MAX_QUEUED_REQUESTS": "-1",
            "PIERHEAD_REQUEST_TIMEOUT_S": "2.5",
            "PIERHEAD_DRAIN_TIMEOUT_S": "0",
            "PIERHEAD_BACKPRESSURE_STATUS_CODE": "429",
            "PIERHEAD_BACKPRESSURE_RETRY_AFTER_S": "2.5",
            "PIERHEAD_DEBUG": "true",
            "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
            "PIERHEAD_NODE": "gpu-7",
            "PIERHEAD_ACCESS_LOG": "Off",
            "PIERHEAD_LOG_ENCODING": "text",
        }
    )
    assert (settings.port, settings.max_ongoing_requests, settings.request_timeout_s) == (50051, 1000, 2.5)
    assert settings.discovery == "controller:8101"
    assert (settings.backpressure_status_code, settings.backpressure_retry_after_s) == (429, 2.5)
    assert (settings.debug, settings.access_log, settings.log_encoding) == (True, "off", "text")
    assert settings.run_user_code_in_separate_thread
    assert settings.node == "gpu-7"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PIERHEAD_PORT",
            "http",
            'PIERHEAD_PORT: expected a port number from 0 to 65535 (0 = any free one), found "http"',
        ),
        ("PIERHEAD_MAX_ONGOING_REQUESTS", "0", 'PIERHEAD_MAX_ONGOING_REQUESTS: expected an integer >= 1, found "0"'),
        ("PIERHEAD_MAX_QUEUED_REQUESTS", "-2", "expected an integer >= 0, or -1 for no bound"),
        ("PIERHEAD_REQUEST_TIMEOUT_S", "nan", "expected a number of seconds above 0"),
        ("PIERHEAD_DRAIN_TIMEOUT_S", "-1", "expected a number of seconds >= 0"),
        ("PIERHEAD_DISCOVERY", "controller", "expected host:port, for example controller:8101"),
        ("PIERHEAD_STATIC_ECHO_CHILD", "10.0.0.1", "PIERHEAD_STATIC_ECHO_CHILD: expected ip:port,ip:port,..."),
        ("PIERHEAD_BACKPRESSURE_STATUS_CODE", "500", 'CKPRESSURE_STATUS_CODE: expected 503 or 429, found "500"'),
        ("PIERHEAD_DEBUG", "yes", 'PIERHEAD_DEBUG: expected true or false, found "yes"'),
        ("PIERHEAD_LOG_ENCODING", "xml", 'PIERHEAD_LOG_ENCODING: expected json or text, found "xml"'),
        ("PIERHEAD_USER_CONFIG", "[]", "PIERHEAD_USER_CONFIG: expected a JSON object of at most 64 KiB"),
        ("PIERHEAD_LOG_LEVEL", "loud", "expected debug, info, warning or error"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: value})
    assert message in str(caught.value)


def test_one_error_names_all_bad_values() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"PIERHEAD_PORT": "x", "PIERHEAD_LOG_LEVEL": "y"})
    assert len(str(caught.value).splitlines()) == 2


def test_a_static_list_is_found_by_the_service_s_name() -> None:
    settings = Settings.from_env({"PIERHEAD_STATIC_ECHO_CHILD": "10.0.0.1:50051, 10.0.0.2:50051"})
    assert settings.static_addresses("echo-child") == ("10.0.0.1:50051", "10.0.0.2:50051")
    assert settings.static_addresses("ranker") == ()
