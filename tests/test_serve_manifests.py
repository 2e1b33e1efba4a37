"""The manifests of servers on Kubernetes: each of their parts agrees with the others and with the verb."""

import math
import pathlib
from typing import Any

import yaml

from eagle3_jax.config import RunConfig
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve import startup

ROOT = pathlib.Path(__file__).parents[1]


def documents(name: str) -> dict[str, Any]:
    """Kind -> document."""
    text = (ROOT / "examples/kubernetes" / name).read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def asked_of(pod: dict[str, Any], hosts: int) -> RunConfig:
    """What its command line asks for, which fits its chips, its variables, its ports and its time to end."""
    (container,) = pod["containers"]
    verb, *arguments = container["args"]
    assert verb == "eagle3_jax.serve"
    config = serve.configure(arguments)
    chips = math.prod(int(side) for side in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert (
        config.mesh.model * (config.mesh.data or 1)
        == chips
        == hosts * container["resources"]["limits"]["google.com/tpu"]
    )
    variables = {variable["name"]: variable for variable in container["env"]}
    assert config.serve.api_key_variable is not None
    assert "secretKeyRef" in variables[config.serve.api_key_variable]["valueFrom"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before + config.serve.drain_timeout + startup.LAST + serve._ENDING < pod["terminationGracePeriodSeconds"]
    return config


def check_probes(pod: dict[str, Any], service: dict[str, Any], labels: dict[str, str], config: RunConfig) -> None:
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    (port,) = service["spec"]["ports"]
    assert ports["http"] == config.serve.port == port["port"] and port["targetPort"] == "http"
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_hosts_of_a_group_are_one_server():
    found = documents("leaderworkerset.yaml")
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    config = asked_of(leader, template["size"])
    assert asked_of(worker, template["size"]) == config
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    check_probes(leader, found["Service"], template["leaderTemplate"]["metadata"]["labels"], config)
    port = {port["name"]: port["containerPort"] for port in leader["containers"][0]["ports"]}["coordinator"]
    for pod in (leader, worker):
        values = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        assert values["JAX_COORDINATOR_ADDRESS"] == f"$(LWS_LEADER_ADDRESS):{port}"
        assert (values["JAX_NUM_PROCESSES"], values["JAX_PROCESS_ID"]) == ("$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
    assert not [name for name in worker["containers"][0] if name.endswith("Probe")]  # it answers no HTTP


def test_the_servers_of_a_deployment_are_scaled_by_a_metric_that_is_there():
    found = documents("deployment.yaml")
    template = found["Deployment"]["spec"]["template"]
    config = asked_of(template["spec"], 1)
    check_probes(template["spec"], found["Service"], template["metadata"]["labels"], config)
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": found["Deployment"]["apiVersion"],
        "kind": "Deployment",
        "name": found["Deployment"]["metadata"]["name"],
    }
    (metric,) = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert (
        f"`{name.removeprefix('eagle3_jax_')}`" in (ROOT / "docs/serve.md").read_text()
    )  # which is compared with /metrics
