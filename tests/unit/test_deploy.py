"""The files in deploy/: what they say to the daemon is what the daemon takes, and their parts fit together."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvstore.v1 import kvstore_pb2
from kvstore_server import cli
from kvstore_server.config import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())
OBJECTS = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
NEEDED = {
    ("apps/v1", "StatefulSet"): {"serviceName", "replicas", "selector", "template", "volumeClaimTemplates"},
    ("apps/v1", "Deployment"): {"replicas", "selector", "template"},
    ("v1", "Service"): {"selector", "ports"},
    ("policy/v1", "PodDisruptionBudget"): {"selector", "maxUnavailable"},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"podSelector", "policyTypes", "ingress"},
}


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings with which `kvstore ARGS` would run under these variables."""

    def settings_of(arguments: list[str], environment: dict[str, str]) -> Settings:
        found: list[Settings] = []

        async def serve(settings: Settings) -> None:
            found.append(settings)

        monkeypatch.setattr(cli, "_serve", serve)
        result = CliRunner().invoke(cli.main, arguments, env=environment)
        assert result.exit_code == 0, result.output
        return found[0]

    return settings_of


def kubernetes(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one["spec"] for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def test_each_object_has_its_kind_a_name_and_the_fields_it_needs() -> None:
    assert {(one["apiVersion"], one["kind"]) for one in OBJECTS} == NEEDED.keys()
    for one in OBJECTS:
        assert one["metadata"]["name"]
        assert NEEDED[one["apiVersion"], one["kind"]] <= one["spec"].keys()
    names = [(one["kind"], one["metadata"]["name"]) for one in OBJECTS]
    assert len(set(names)) == len(names)


def test_selectors_and_services_name_the_pods_and_ports_that_there_are() -> None:
    for workload, name in (("StatefulSet", "kvstore"), ("Deployment", "kvstore-redis")):
        spec = kubernetes(workload, name)
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == kubernetes("Service", name)["selector"]
        (container,) = spec["template"]["spec"]["containers"]
        listening = {(port["name"], port["containerPort"]) for port in container["ports"]}
        assert {(port["name"], port["port"]) for port in kubernetes("Service", name)["ports"]} == listening
    labels = kubernetes("StatefulSet", "kvstore")["template"]["metadata"]["labels"]
    assert kubernetes("PodDisruptionBudget", "kvstore")["selector"]["matchLabels"] == labels
    assert kubernetes("NetworkPolicy", "kvstore")["podSelector"]["matchLabels"] == labels


def test_the_daemon_of_kubernetes_takes_its_flags_and_is_found_under_its_name(settings_of: Any) -> None:
    spec = kubernetes("StatefulSet", "kvstore")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (variable,) = container["env"]
    assert (variable["name"], variable["valueFrom"]["fieldRef"]["fieldPath"]) == ("POD_NAME", "metadata.name")
    arguments = [argument.replace("$(POD_NAME)", "kvstore-1") for argument in container["args"]]
    settings = settings_of(arguments, {})
    assert settings.node_id == "kvstore-1"
    assert settings.advertised == [f"kvstore-1.{spec['serviceName']}:{settings.tcp_port}"]
    assert kubernetes("Service", spec["serviceName"])["clusterIP"] == "None"
    assert settings.cluster_url == "redis://kvstore-redis:6379"
    assert {port["containerPort"] for port in container["ports"]} == {settings.tcp_port, settings.metrics_port}
    (mount,) = container["volumeMounts"]
    assert settings.disk_path.startswith(mount["mountPath"])
    assert mount["name"] == spec["volumeClaimTemplates"][0]["metadata"]["name"]
    assert not pod["enableServiceLinks"], "KVSTORE_REDIS_PORT is no setting"
    assert pod["terminationGracePeriodSeconds"] > settings.stop_timeout_s
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30 > settings.cpu_capacity
    storage = spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert int(storage.removesuffix("Gi")) << 30 > settings.disk_capacity + settings.disk_reserve


def test_probes_ask_for_services_that_there_are() -> None:
    (container,) = kubernetes("StatefulSet", "kvstore")["template"]["spec"]["containers"]
    known = ["", *(service.full_name for service in kvstore_pb2.DESCRIPTOR.services_by_name.values())]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == 7311
        assert container[probe]["grpc"].get("service", "") in known
    assert container["livenessProbe"]["grpc"]["service"] == "kvstore.v1.Admin", "serves while the others drain"


def test_the_daemons_of_compose_take_their_settings_and_differ_in_who_they_are(settings_of: Any) -> None:
    assert list(COMPOSE["services"]) == ["redis", "kv-0", "kv-1", "kv-2"]
    assert COMPOSE["services"]["redis"]["networks"] == ["store"]
    for name in ("kv-0", "kv-1", "kv-2"):
        service = COMPOSE["services"][name]
        settings = settings_of(["serve"], service["environment"])
        assert settings.node_id == name
        assert settings.advertised == [f"{name}:{settings.tcp_port}"]
        assert settings.cluster_url == "redis://redis:6379"
        assert service["networks"] == ["store"]
        dockerfile = ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
        assert dockerfile.resolve() == ROOT / "deploy" / "Dockerfile"


def test_the_image_is_made_of_files_that_there_are_and_runs_the_command() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    assert 'ENTRYPOINT ["kvstore"]' in lines
    assert 'CMD ["serve"]' in lines
