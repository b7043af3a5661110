"""Every way to reach a server: schemes, TLS, socket files, Sentinel, failover lists; and who knows the schemes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Queue
from redis.credentials import CredentialProvider

from celery_claim.exceptions import ConfigurationError
from celery_claim.transport import Transport
from tests.servers import PASSWORD, Redis, TLSRedis, free_port
from tests.streams.sentinel import Sentinels, watched

OPTIONS = {"block_timeout": 0.2}


def carries_a_message(url: str, *, options: dict[str, Any] | None = None, **arguments: Any) -> bool:
    """Whether a message goes to the broker and comes back, over our transport and no other."""
    given = {**OPTIONS, **(options or {})}
    with Connection(url, transport_options=given, connect_timeout=5, **arguments) as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        assert type(connection.transport) is Transport
        queue = connection.SimpleQueue(Queue("here", routing_key="here"))
        queue.put({"n": 1})
        message = queue.get(timeout=10)
        message.ack()
        queue.close()
        return bool(message.payload == {"n": 1})


def ours(server: Any) -> str:
    """The server's URL with our scheme."""
    scheme, rest = str(server.url).split("://", 1)
    return f"{scheme}-streams://{rest}"


# ---- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_server() -> Iterator[TLSRedis]:
    server = TLSRedis()
    server.start()
    yield server
    server.stop()


@pytest.mark.servers
def test_a_certificate_is_verified_unless_told_otherwise(tls_server: TLSRedis) -> None:
    url = ours(tls_server)

    with pytest.raises(ConfigurationError, match=r"certificate .* is not accepted .*ssl_ca_certs") as refused:
        carries_a_message(url)
    assert PASSWORD not in str(refused.value)
    assert carries_a_message(f"{url}?ssl_ca_certs={tls_server.authority}")
    assert carries_a_message(f"{url}?ssl_cert_reqs=none")


@pytest.mark.servers
def test_a_certificate_for_another_host_is_refused(tls_server: TLSRedis) -> None:
    url = f"{ours(tls_server)}?ssl_ca_certs={tls_server.authority}".replace("127.0.0.1", "localhost")

    with pytest.raises(ConfigurationError, match="Hostname mismatch"):
        carries_a_message(url)


@pytest.mark.servers
@pytest.mark.parametrize("reqs", ["required", "optional", "CERT_REQUIRED"])
def test_tls_options_come_by_the_url_by_broker_use_ssl_and_by_transport_options(tls_server: Any, reqs: str) -> None:
    given = {"ssl_ca_certs": str(tls_server.authority), "ssl_cert_reqs": reqs}
    url = ours(tls_server)

    assert carries_a_message(f"{url}?ssl_ca_certs={tls_server.authority}&ssl_cert_reqs={reqs}")
    assert carries_a_message(url, ssl=given)
    assert carries_a_message(url.replace("rediss", "redis"), ssl=given)
    assert carries_a_message(url, options=given)


@pytest.mark.servers
def test_a_password_never_travels_in_clear_by_a_forgotten_scheme(tls_server: TLSRedis) -> None:
    with pytest.raises(ConfigurationError, match="'ssl_ca_certs' is given, but the connection is not encrypted"):
        carries_a_message(
            ours(tls_server).replace("rediss", "redis"), options={"ssl_ca_certs": str(tls_server.authority)}
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ssl_ca_certs": "/nowhere.pem"}, "'ssl_ca_certs' is '/nowhere.pem', which does not exist"),
        ({"ssl_ca_cert": "x"}, "unknown TLS option 'ssl_ca_cert'. Did you mean 'ssl_ca_certs'?"),
        ({"ssl_cert_reqs": "perhaps"}, "'ssl_cert_reqs' is 'perhaps'; it is 'required', 'optional' or 'none'"),
    ],
)
def test_a_tls_option_that_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        carries_a_message("rediss-streams://127.0.0.1:1/0", ssl=given)

    assert said in str(refused.value)


# ---- socket files, failover lists, Sentinel -------------------------------------------------------------------


@pytest.fixture(scope="module")
def socket_server() -> Iterator[Any]:
    server = Redis()
    server.settings["unixsocket"] = str(server.folder / "redis.sock")
    server.start()
    yield server
    server.stop()


@pytest.mark.servers
def test_a_socket_file_carries_messages_into_the_database_of_the_url(socket_server: Any) -> None:
    path = socket_server.settings["unixsocket"]

    assert carries_a_message(f"redis-streams+socket://:{PASSWORD}@{path}?virtual_host=3")
    with redis.Redis(unix_socket_path=path, password=PASSWORD, db=3) as client:
        assert client.sismember("cs1:queues", "here")
    with pytest.raises(ConfigurationError, match="three slashes"):
        carries_a_message(f"redis-streams+socket:/{path}")


@pytest.mark.servers
def test_a_failover_list_may_lead_from_one_kind_to_the_other(socket_server: Any) -> None:
    path, dead = socket_server.settings["unixsocket"], f"redis-streams://127.0.0.1:{free_port()}/0"

    assert carries_a_message(f"{dead};redis-streams+socket://:{PASSWORD}@{path}")
    assert carries_a_message(f"redis-streams+socket:///no/redis.sock;{ours(socket_server)}")


def test_failover_keeps_our_transport(server: Any) -> None:
    dead = f"127.0.0.1:{free_port()}"

    assert carries_a_message(f"redis-streams://{dead}/0;{ours(server)}")
    # Written short: the port is in the name of the host, and the rest is as in the first.
    assert carries_a_message(f"redis-streams://:{PASSWORD}@{dead}/0;127.0.0.1:{server.port}")


@pytest.mark.parametrize("url", ["redis://a;redis://b", "redis-streams://a;redis://b", "rediss-streams://a;rediss://b"])
def test_a_failover_list_that_would_leave_our_transport_is_refused(url: str) -> None:
    chosen = {"transport": "celery_claim.transport:Transport"} if url.startswith("redis:") else {}

    with pytest.raises(ConfigurationError, match=r"kombu would use its own transport .*-streams:// in each"):
        Connection(url, **chosen).transport  # noqa: B018


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with watched() as running:
        yield running


@pytest.mark.servers
def test_sentinels_lead_to_the_master_whichever_of_them_is_down(sentinels: Sentinels) -> None:
    dead = f"sentinel-streams://:{PASSWORD}@127.0.0.1:{free_port()}/2"

    assert carries_a_message(sentinels.url, options=sentinels.options)
    assert carries_a_message(f"{dead};{sentinels.url.split(';')[2]}", options=sentinels.options)
    with redis.Redis(port=sentinels.master.port, password=PASSWORD, db=2) as client:
        assert client.sismember("cs1:queues", "here")


@pytest.mark.servers
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"master_name": "other"}, "the transport option 'master_name' is 'other'; the sentinels .* know claim"),
        ({"sentinel_kwargs": {"password": "wr0ng"}}, "the sentinels refuse us .*'sentinel_kwargs'"),
        ({"master_name": None}, "sentinel-streams:// needs the name of the master"),
    ],
)
def test_a_sentinel_that_cannot_help_is_explained(
    sentinels: Sentinels, changed: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process the same servers have worked before, and a fault would count as one that passes.
    monkeypatch.setattr("celery_claim.transport.refuse._used", set())

    with pytest.raises(ConfigurationError, match=said) as refused:
        carries_a_message(sentinels.url, options={**sentinels.options, **changed})
    assert "wr0ng" not in str(refused.value)


@pytest.mark.servers
def test_a_sentinel_taken_for_a_server_is_refused(sentinels: Sentinels) -> None:
    with pytest.raises(ConfigurationError, match="is a Sentinel: the broker URL begins with sentinel-streams://"):
        carries_a_message(f"redis-streams://:{PASSWORD}@127.0.0.1:{sentinels.sentinels[0].port}/0")


# ---- who we are to the server ---------------------------------------------------------------------------------


class Keyring(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return "carol", "of-the-keyring"


def user_of(server: Any, name: str) -> dict[str, str]:
    with server.client() as client:
        return next(each for each in client.client_list() if each["name"] == name)


def test_user_database_and_client_name_are_those_asked_for(server: Any) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "carol", "on", ">of-the-keyring", "~*", "+@all")
    url = f"redis-streams://carol:of-the-keyring@127.0.0.1:{server.port}/5"

    with Connection(url, transport_options={"client_name": "mailer"}) as connection:
        connection.connect()
        seen = user_of(server, "mailer")

    assert (seen["user"], seen["db"]) == ("carol", "5")


@pytest.mark.parametrize("provider", [Keyring(), f"{__name__}:Keyring"], ids=["object", "name"])
def test_a_credential_provider_takes_the_place_of_the_password(server: Any, provider: Any) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "carol", "on", ">of-the-keyring", "~*", "+@all")
    options = {"client_name": "keyring", "credential_provider": provider}

    with Connection(f"redis-streams://127.0.0.1:{server.port}/0", transport_options=options) as connection:
        connection.connect()
        assert user_of(server, "keyring")["user"] == "carol"


# ---- who knows the schemes ------------------------------------------------------------------------------------

#: Runs before anything else: this machine has no entry points.
WITHOUT_ENTRY_POINTS = "import importlib.metadata as m; m.entry_points = lambda **k: m.EntryPoints(()); "
SCHEMES = "redis-streams://h rediss-streams://h sentinel-streams://h redis-streams+socket:///s".split()


def run_python(program: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CELERY")}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**clean, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def transports(connect: str) -> str:
    return f"print({{ {connect}.get_transport_cls().__module__ for url in {SCHEMES!r} }})"


OURS = "{'celery_claim.transport.transport'}"


def test_a_celery_app_that_never_imports_us_knows_the_schemes_by_the_entry_point() -> None:
    assert run_python("from celery import Celery; " + transports("Celery(broker=url).connection()")) == OURS


def test_plain_kombu_knows_the_schemes_after_import_celery_claim() -> None:
    program = WITHOUT_ENTRY_POINTS + "import celery_claim; from kombu import Connection; "

    assert run_python(program + transports("Connection(url)")) == OURS


def test_a_foreign_program_knows_the_schemes_by_its_configuration_module() -> None:
    program = WITHOUT_ENTRY_POINTS + "from celery import Celery; app = Celery(); app.conf.task_serializer; "
    program += "from kombu import Connection; " + transports("Connection(url)")

    assert run_python(program, CELERY_CONFIG_MODULE="celery_claim.autoload") == OURS


def test_celery_finds_its_subcommand_and_the_serializer_by_entry_points() -> None:
    program = (
        "from celery import Celery; from kombu.serialization import dumps, loads; "
        "kind, encoding, text = dumps({'ä': 1}, 'claim-json'); assert loads(text, kind, encoding) == {'ä': 1}; "
        "from celery.bin.celery import celery; print('claim' in celery.commands)"
    )

    assert run_python(program) == "True"


def test_the_registering_module_imports_next_to_nothing_and_is_quick() -> None:
    program = (
        "import sys, time; import kombu.transport; start = time.perf_counter(); import celery_claim.autoload; "
        "took = time.perf_counter() - start; heavy = {'redis', 'sqlalchemy', 'celery.app.base'} & set(sys.modules); "
        "assert not heavy, heavy; print(took)"
    )

    # 20 ms is the promise; a machine under load is given five times as much, in the best of three runs.
    assert min(float(run_python(WITHOUT_ENTRY_POINTS + program)) for _ in range(3)) < 0.1


def test_the_registering_module_never_raises() -> None:
    program = (
        "import sys; sys.modules['kombu'] = None; import celery_claim.autoload as a; print(a.TRANSPORTS_REGISTERED)"
    )

    assert run_python(WITHOUT_ENTRY_POINTS + program) == "False"


def test_celery_report_prints_no_password(server: Any) -> None:
    program = (
        f"from celery import Celery; app = Celery(broker={ours(server)!r}); "
        f"app.conf.broker_transport_options = {{'sentinel_kwargs': {{'password': {PASSWORD!r}}}}}; "
        "print(app.bugreport())"
    )

    report = run_python(program)

    assert "redis-streams" in report and "sentinel_kwargs" in report
    assert PASSWORD not in report
