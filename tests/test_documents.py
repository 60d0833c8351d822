"""What the documentation and the examples say is what the program declares."""

from __future__ import annotations

import runpy

import yaml

from binade.collector.cli.options import read
from tests.conftest import PROJECT


def test_the_reference_is_printed_by_its_program():
    docs = PROJECT / "docs"
    assert (docs / "reference.md").read_text() == runpy.run_path(str(docs / "generate.py"))["page"]()


def test_the_pytorchjob_has_what_its_definition_requires():
    """kubeflow.org/v1: the fields that the CustomResourceDefinition requires, and the operator's names."""
    job = yaml.safe_load((PROJECT / "examples" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"] and replica["restartPolicy"] == "Never"
        volumes = {volume["name"] for volume in pod["volumes"] if volume["persistentVolumeClaim"]["claimName"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"]}
        assert all(isinstance(word, str) for word in container["command"])
        request = read(container["command"][3:])  # after python -m binade
        assert request.runs[0].world_size == sum(each["replicas"] for each in replicas.values())
