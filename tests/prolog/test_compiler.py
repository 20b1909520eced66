from __future__ import annotations

import re

import pytest

from gpuhealth.compiler import PolicyError, compile_policy
from gpuhealth.policy import Cap, Policy, Ports, dump, load

TEXT = """
skus:
  h100-ndr:
    match: {nodes: "gpu-[1-64]", gpu: "NVIDIA H100 80GB HBM3"}
    gpus: 8
    nvlinks: 18
    gpudirect: any
    ports: {names: ["mlx5_0:1", mlx5_3:1], rate_gbps: 400, width: 4, link_layer: infiniband, pkeys: [0x8001]}
    versions: {driver: 580.*, firmware: 28.41.1000}
    pcie: {gpu: {width: 16}, hca: {width: 16, speed_gts: 32}}
    mounts: [/scratch]
checks: {ib_port: drain, hung: warn}
max_drained: {count: 2, percent: 10}
report_dir: null
"""


def test_a_whole_policy() -> None:
    policy = compile_policy(TEXT, "health.yaml")
    (sku,) = policy.skus
    assert sku.name == "h100-ndr"
    assert sku.nodes == "gpu-[1-64]"
    assert sku.gpus == 8
    assert sku.gpudirect == "any"
    assert sku.ports == Ports(("mlx5_0:1", "mlx5_3:1"), 400.0, 4, "InfiniBand", (0x8001,))
    assert sku.versions == {"driver": "580.*", "firmware": "28.41.1000"}
    assert policy.checks == {"ib_port": "drain", "hung": "warn"}
    assert policy.max_drained == Cap(2, 10.0)
    assert policy.report_dir is None
    assert load(dump(policy)) == policy


@pytest.mark.parametrize("word", ["off", '"off"', "OFF", "Off"])
def test_what_yaml_takes_for_a_boolean_is_a_word(word: str) -> None:
    policy = compile_policy(f"checks: {{ib_port: {word}}}", "f")
    assert policy.checks == {"ib_port": "off"}


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("on", True), ("False", False)])
def test_booleans(word: str, value: bool) -> None:
    text = f"skus: {{a: {{match: {{nodes: a}}, persistence: {word}}}}}"
    assert compile_policy(text, "f").skus[0].persistence is value


def test_versions_are_texts_however_yaml_reads_them() -> None:
    text = "skus: {a: {match: {nodes: a}, versions: {driver: 580.10, kernel: 6.8}}}"
    assert compile_policy(text, "f").skus[0].versions == {"driver": "580.10", "kernel": "6.8"}


def test_anchors_and_merges() -> None:
    text = """
skus:
  a: &a
    match: {nodes: a}
    gpus: 8
  b:
    <<: *a
    match: {nodes: b}
"""
    policy = compile_policy(text, "f")
    assert [(sku.name, sku.nodes, sku.gpus) for sku in policy.skus] == [
        ("a", "a", 8),
        ("b", "b", 8),
    ]


SKU = "skus: {a: {match: {nodes: a}, %s}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: there is nothing in it"),
        ("null", "f: there is nothing in it"),
        ("- a", "f:1: the policy: expected keys and values"),
        ("a: [", "f:1: "),
        ("a: b: c", "f:1: mapping values are not allowed here"),
        ("cheks: {}", "f:1: the policy: there is no key 'cheks'; did you mean 'checks'?"),
        ("\n\nfoo: 1", "f:3: the policy: there is no key 'foo'; known are skus, checks"),
        ("checks: {ib_prot: warn}", "f:1: checks: there is no check 'ib_prot'; did you mean 'ib_port'?"),
        ("checks: {ib_port: dran}", "f:1: checks.ib_port: expected drain, warn or off, not 'dran'; did you mean 'drain'?"),
        ("checks: {ib_port: warn, ib_port: off}", "ib_port stands there twice"),
        ("skus: {}", "f:1: skus: there is no SKU"),
        ("skus: {a: {gpus: 8}}", "f:1: skus.a: add match"),
        (SKU % "gpus: eight", "skus.a.gpus: expected a whole number, not 'eight'"),
        (SKU % "gpus: -1", "expected a whole number"),
        (SKU % "gpus: [1]", "expected a text"),
        (SKU % "gpudirect: maybe", "expected any, dmabuf, peermem, both or off, not 'maybe'"),
        (SKU % "ports: {rate_gbps: 400}", "skus.a.ports: add names"),
        (SKU % "ports: {names: []}", "skus.a.ports: add names"),
        (SKU % "ports: {names: mlx5_0:1}", "skus.a.ports.names: expected a list"),
        (SKU % "ports: {names: [mlx5_0:1, mlx5_0:1]}", "mlx5_0:1 stands there twice"),
        (SKU % "ports: {names: [../x]}", "skus.a.ports.names[0]: '../x' is no port like mlx5_0:1"),
        (SKU % "ports: {names: [a], link_layer: IB}", "expected InfiniBand or Ethernet, not 'IB'"),
        (SKU % "ports: {names: [a], pkeys: [0]}", "expected a P_Key like 0x8001"),
        (SKU % "ports: {names: [a], rate: 400}", "there is no key 'rate'; did you mean 'rate_gbps'?"),
        (SKU % "mounts: [scratch]", "expected an absolute path, not 'scratch'"),
        (SKU % "versions: {drvier: x}", "there is no version 'drvier'; did you mean 'driver'?"),
        ('skus: {a: {match: {nodes: "gpu-[1-"}}}', "skus.a.match.nodes: 'gpu-[1-': a bracket is open"),
        ("max_drained: {percent: 101}", "max_drained.percent: expected 0 to 100"),
        ("max_drained: {count: 1.5}", "expected a whole number"),
        ("report_dir: reports", "report_dir: expected an absolute path"),
        ("thresholds: {ib_counters.symbol_eror: {per_hour: 1}}", "there is no threshold 'ib_counters.symbol_eror'"),
        ("!!python/object:os.system {}", "expected keys"),
        ("a: &a [*a]", "there is no key 'a'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(text, "f")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert re.match(r"f(:\d+)?: ", str(raised.value))


def test_an_empty_section_is_as_good_as_none() -> None:
    assert compile_policy("checks:\nreport_dir:\n", "f") == Policy()
