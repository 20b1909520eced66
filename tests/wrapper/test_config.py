from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusub.config import load
from gpusub.errors import GpusubError
from gpusub.profile import Profile
from gpusub.request import Value

GOOD = """\
default_profile: h100
profiles:
  h100:
    partition: gpu
    account: ~
    qos: normal
    time: 12:30:00
    constraint: h100&ndr
    reservation: "monday"
    gpus_per_node: h100:8
    cpus_per_gpu: 12
    mem_per_gpu: 100G
    gpu_request: gres
    shared: true
    rendezvous: static
    fabric:
      type: infiniband
      hcas: [mlx5_0:1, "mlx5_3:1"]
      service_level: 5
      traffic_class: 136
      gdr_level: PHB
      gid_index: 3
      pkey: 1
      qps_per_connection: 2
      socket_ifname: eth0
    env: {TOKENIZERS_PARALLELISM: no, N: 010, T: 12:30:00, E: "", F: 1e3}
    setup:
      - module load cuda
      - export A=b
    template: torchrun
  debug:
"""

ONE = "default_profile: p\nprofiles:\n  p:\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gpusub.yaml"


@pytest.fixture
def loaded(file: Path) -> Callable[[str], Profile]:
    def read(content: str) -> Profile:
        file.write_bytes(content.encode())
        return load([file], None)

    return read


def values(stated: Any) -> dict[str, Any]:
    return {key: value.value for key, value in stated.items()}


def test_every_key_is_read_as_written(loaded: Callable[[str], Profile], file: Path) -> None:
    profile = loaded(GOOD)
    assert profile.name == "h100"
    assert values(profile.settings) == {
        "partition": "gpu",
        "account": None,
        "qos": "normal",
        "time": "12:30:00",
        "constraint": "h100&ndr",
        "reservation": "monday",
        "gpus_per_node": "h100:8",
        "cpus_per_gpu": 12,
        "mem_per_gpu": "100G",
        "gpu_request": "gres",
        "shared": True,
        "rendezvous": "static",
        "setup": ["module load cuda", "export A=b"],
        "template": "torchrun",
    }
    assert values(profile.fabric) == {
        "type": "infiniband",
        "hcas": ("mlx5_0:1", "mlx5_3:1"),
        "service_level": 5,
        "traffic_class": 136,
        "gdr_level": "PHB",
        "gid_index": 3,
        "pkey": 1,
        "qps_per_connection": 2,
        "socket_ifname": "eth0",
    }
    assert values(profile.env) == {
        "TOKENIZERS_PARALLELISM": "no",
        "N": "010",
        "T": "12:30:00",
        "E": "",
        "F": "1e3",
    }
    lines = GOOD.splitlines()
    for key, value in {**profile.settings, **profile.fabric, **profile.env}.items():
        stated = re.fullmatch(rf"profile h100 \({re.escape(str(file))}:(\d+)\)", value.origin)
        assert stated
        assert re.search(rf"\b{key}:", lines[int(stated[1]) - 1])


@pytest.mark.parametrize("null", ["", "~", "null", "Null", "NULL"])
@pytest.mark.parametrize("key", ["account", "time", "gpus_per_node", "cpus_per_gpu", "shared"])
def test_null_is_not_set(loaded: Callable[[str], Profile], key: str, null: str) -> None:
    assert loaded(f"{ONE}    {key}: {null}\n").settings[key].value is None


@pytest.mark.parametrize("word", ["'null'", '"~"'])
def test_null_in_quotes_is_a_text(loaded: Callable[[str], Profile], word: str) -> None:
    assert loaded(f"{ONE}    account: {word}\n").settings["account"].value == word[1:-1]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("time", "12:30:00", "12:30:00"),
        ("time", "2:30", "2:30"),
        ("time", "90", "90"),
        ("time", "010", "010"),
        ("time", "'04:00:00'", "04:00:00"),
        ("time", "2-12", "2-12"),
        ("account", "no", "no"),
        ("account", "010", "010"),
        ("account", "0x10", "0x10"),
        ("account", "1e3", "1e3"),
        ("account", "12:30", "12:30"),
        ("account", "2026-11-30", "2026-11-30"),
        ("account", "1_000", "1_000"),
        ("account", ".inf", ".inf"),
        ("account", "=", "="),
        ("gpus_per_node", "8", "8"),
        ("gpus_per_node", "a100_3g.20gb:2", "a100_3g.20gb:2"),
        ("cpus_per_gpu", "12", 12),
        ("shared", "true", True),
        ("shared", "False", False),
        ("shared", "'TRUE'", True),
        ("partition", "!!str 8", "8"),
        ("partition", "true", "true"),
        ("partition", "\tgpu", "gpu"),
        ("partition", ">-\n      gpu", "gpu"),
        ("time", "12:30:00 # half a day", "12:30:00"),
        ("setup", "[]", []),
        ("mem_per_gpu", "512", "512"),
        ("mem_per_gpu", "2t", "2t"),
    ],
)
def test_nothing_that_yaml_would_mistype_is_mistyped(
    loaded: Callable[[str], Profile], key: str, written: str, value: object
) -> None:
    assert loaded(f"{ONE}    {key}: {written}\n").settings[key].value == value


@pytest.mark.parametrize(
    ("written", "line", "problem"),
    [
        ("time: no", 4, "profiles.p.time: 'no' is no time limit"),
        ("time: 4h", 4, "profiles.p.time: '4h' is no time limit"),
        ("time: 1e3", 4, "profiles.p.time: '1e3' is no time limit"),
        ("time: 0x10", 4, "profiles.p.time: '0x10' is no time limit"),
        ("time: [1]", 4, "profiles.p.time: expected a text, got a list"),
        ("time: {a: b}", 4, "profiles.p.time: expected a text, got keys"),
        ("cpus_per_gpu: no", 4, "profiles.p.cpus_per_gpu: expected a plain number, got 'no'"),
        ("cpus_per_gpu: 010", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '010'"),
        ("cpus_per_gpu: 0x10", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '0x10'"),
        ("cpus_per_gpu: 12:30", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '12:30'"),
        ("cpus_per_gpu: 1_0", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '1_0'"),
        ("cpus_per_gpu: 1e3", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '1e3'"),
        ("cpus_per_gpu: 8.0", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '8.0'"),
        ("cpus_per_gpu: +8", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '+8'"),
        (f"cpus_per_gpu: {'9' * 40}", 4, "profiles.p.cpus_per_gpu: expected a plain number, got"),
        ("cpus_per_gpu: ٣", 4, "profiles.p.cpus_per_gpu: expected a plain number, got '٣'"),
        ("cpus_per_gpu: [8]", 4, "profiles.p.cpus_per_gpu: expected a plain number, got a list"),
        ("cpus_per_gpu: 0", 4, "profiles.p.cpus_per_gpu: 0: write 1 or more"),
        ("cpus_per_gpu: -1", 4, "profiles.p.cpus_per_gpu: -1: write 1 or more"),
        ("gpus_per_node: no", 4, "profiles.p.gpus_per_node: 'no': write 8, or TYPE:8"),
        ("gpus_per_node: -1", 4, "profiles.p.gpus_per_node: '-1': write 8, or TYPE:8"),
        ("gpus_per_node: 1e3", 4, "profiles.p.gpus_per_node: '1e3': write 8, or TYPE:8"),
        ("gpus_per_node: 8:8", 4, "profiles.p.gpus_per_node: '8:8': write 8, or TYPE:8"),
        ("mem_per_gpu: 1e3", 4, "profiles.p.mem_per_gpu: '1e3': write a size, as in 100G"),
        ("mem_per_gpu: 0", 4, "profiles.p.mem_per_gpu: '0': write a size, as in 100G"),
        ("shared: no", 4, "profiles.p.shared: write true or false"),
        ("shared: yes", 4, "profiles.p.shared: write true or false"),
        ("shared: 1", 4, "profiles.p.shared: write true or false"),
        ("shared: []", 4, "profiles.p.shared: write true or false"),
        ("rendezvous: C10D", 4, "profiles.p.rendezvous: 'C10D' is none of c10d, static"),
        ("gpu_request: gpus", 4, "profiles.p.gpu_request: 'gpus' is none of gpus-per-node, gres,"),
        ("setup: module load x", 4, "profiles.p.setup: expected a list, got a text"),
        (
            "setup:\n      - export A: b",
            5,
            "profiles.p.setup: expected a text, got keys; put it in",
        ),
        ("setup:\n      - a\n      - [b]", 6, "profiles.p.setup: expected a text, got a list"),
        ("setup: [~]", 4, "profiles.p.setup: expected a text, got null"),
        ("env: [A=b]", 4, "profiles.p.env: expected keys, got a list"),
        ("env:\n      A-B: 1", 5, "profiles.p.env.A-B: no name that a shell can export"),
        ("env: {A: ~}", 4, "profiles.p.env.A: expected a text, got nothing; write it in quotes"),
        ("env:\n      B: b\n      A:", 6, "profiles.p.env.A: expected a text, got nothing"),
        ("env:\n      A: [1]", 5, "profiles.p.env.A: expected a text, got a list"),
        ("env:\n      A: {b: c}", 5, "profiles.p.env.A: expected a text, got keys"),
        ("env: !!set {A, B}", 4, "!!set means nothing here; write the value itself"),
        ("partition: !env X", 4, "!env means nothing here; write the value itself"),
        ("partition: !!binary aGk=", 4, "!!binary means nothing here; write the value itself"),
        ("partition: ''", 4, "profiles.p.partition: nothing in the quotes; write null for 'not s"),
        ("partition: |\n      gpu", 4, "profiles.p.partition: a line break or tab cannot stand in"),
        ("partition: @gpu", 4, "not valid YAML: found character that cannot start any token; ind"),
        ("partition:gpu\n    time: 1", 5, "not valid YAML: mapping values are not allowed in"),
        ("partition:gpu", 3, "profiles.p: must hold keys, as in 'partition: gpu'"),
        ('env:\n      A: "x\\0y"', 5, "a NUL cannot stand in a value"),
        ("fabric: infiniband", 4, "profiles.p.fabric: expected keys, got a text"),
        ("fabric:\n      type: ib", 5, "profiles.p.fabric.type: 'ib' is none of infiniband, roce,"),
        ("fabric:\n      gdr_level: phb", 5, "profiles.p.fabric.gdr_level: 'phb' is none of LOC,"),
        ("fabric:\n      hcas: mlx5_0:1", 5, "profiles.p.fabric.hcas: expected a list, got a text"),
        ("fabric: [type, roce]", 4, "profiles.p.fabric: expected keys, got a list; write keys bel"),
        ("fabric:\n      - type: roce", 4, "profiles.p.fabric: expected keys, got a list"),
        (
            "fabric:\n      hcas: [mlx5_0: 1]",
            5,
            "profiles.p.fabric.hcas: expected a text, got keys;",
        ),
        ("fabric:\n      hcas: ['a,b']", 5, "profiles.p.fabric.hcas: 'a,b': write one HCA an item"),
        ("fabric:\n      service_level: 16", 5, "profiles.p.fabric.service_level: 16: write 0 to"),
        ("fabric:\n      traffic_class: 256", 5, "profiles.p.fabric.traffic_class: 256: write 0"),
        ("fabric:\n      pkey: -1", 5, "profiles.p.fabric.pkey: -1: write 0 to 65535"),
        ("fabric:\n      hcas: [~]", 5, "profiles.p.fabric.hcas: expected a text, got null"),
        (
            "fabric:\n      service_level: 010",
            5,
            "profiles.p.fabric.service_level: expected a plain number, got '010'; write it in di",
        ),
        ("fabric:\n      service_level: true", 5, "profiles.p.fabric.service_level: expected a"),
        ("partitions: gpu", 4, "profiles.p.partitions: unknown key; did you mean 'partition'?"),
        ("gpu_per_node: 8", 4, "profiles.p.gpu_per_node: unknown key; did you mean 'gpus_per_n"),
        ("zzz: 1", 4, "profiles.p.zzz: unknown key; known keys: partition, account, "),
        ("fabric:\n      hca: [a]", 5, "profiles.p.fabric.hca: unknown key; did you mean 'hcas'?"),
        ("time: 1\n    time: 2", 5, "time stands there twice"),
        ("fabric: {pkey: 1, pkey: 1}", 4, "pkey stands there twice"),
        ("time: 1\n  p:\n    time: 2", 5, "p stands there twice"),
        ("? [a]\n    : b", 4, "no plain key"),
        ("<<: x", 4, "<< takes in keys; write <<: *NAME of an anchor"),
        ("<<: {tiem: 1}", 4, "profiles.p.tiem: unknown key; did you mean 'time'?"),
        ("~: x", 4, "profiles.p.~: unknown key; "),
        ("1: x", 4, "profiles.p.1: unknown key; "),
        ("{a: b}: x", 4, "no plain key; write NAME: value"),
        (f"setup: {'[' * 3000}", 4, "not valid YAML: "),
        ("\ttime: 1", 4, "not valid YAML: "),
        ("time: [1", 5, "not valid YAML: "),
        ("time: 1: 2", 4, "not valid YAML: "),
        ("time: *nowhere", 4, "not valid YAML: found undefined alias"),
        ("time: a\x01b", 4, "not valid YAML: unacceptable character #x0001"),
        ("time: 1\n---\na: 1", 5, "not valid YAML: "),
        ("time: !!python/object/apply:os.system [id]", 4, "!!python/object/apply:os.system means"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_line(
    loaded: Callable[[str], Profile], file: Path, written: str, line: int, problem: str
) -> None:
    with pytest.raises(GpusubError) as refused:
        loaded(f"{ONE}    {written}\n")
    assert str(refused.value).startswith(f"{file}:{line}: {problem}")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("- a\n", 1, "must hold keys, as in 'profiles:'"),
        ("# x\nhello\n", 2, "must hold keys, as in 'profiles:'"),
        ("profile:\n  p: {}\n", 1, "profile: unknown key; did you mean 'profiles'?"),
        ("profiles: [a]\n", 1, "profiles: expected keys, got a list"),
        ("profiles:\n  p: x\n", 2, "profiles.p: must hold keys, as in 'partition: gpu'"),
        # A profile that is not asked for must hold too, or it breaks on somebody else's day.
        ("profiles:\n  q: {zzz: 1}\n", 2, "profiles.q.zzz: unknown key"),
        ("profiles:\n  - p: {}\n", 1, "profiles: expected keys, got a list; write names below it"),
        ("default_profile: [a]\n", 1, "default_profile: expected a text, got a list"),
        (
            "#\ndefault_profile: x\nprofiles: {p: }\n",
            2,
            "default_profile: no profile 'x'; there is p",
        ),
        ("default_profile: x\n", 1, "default_profile: no profile 'x'; no file states any"),
    ],
)
def test_a_wrong_whole_is_named_with_its_line(
    loaded: Callable[[str], Profile], file: Path, content: str, line: int, problem: str
) -> None:
    with pytest.raises(GpusubError) as refused:
        loaded(content)
    assert str(refused.value).startswith(f"{file}:{line}: {problem}")


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "~\n", "{}\n", "profiles:\n"])
def test_an_empty_file_states_nothing(loaded: Callable[[str], Profile], content: str) -> None:
    assert loaded(content) == Profile()


@pytest.mark.parametrize("change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n")])
def test_an_editor_of_another_system_does_no_harm(
    loaded: Callable[[str], Profile], change: Callable[[str], str]
) -> None:
    assert loaded(change(GOOD)) == loaded(GOOD)


def test_an_anchor_stands_for_what_it_names(loaded: Callable[[str], Profile]) -> None:
    profile = loaded("default_profile: q\nprofiles:\n  p: &a {time: 1, env: {A: b}}\n  q: *a\n")
    assert (values(profile.settings), values(profile.env)) == ({"time": "1"}, {"A": "b"})


def test_a_merge_key_takes_in_what_is_not_written_out(
    loaded: Callable[[str], Profile], file: Path
) -> None:
    profile = loaded(
        "default_profile: q\nprofiles:\n"
        "  p: &p {time: 1, qos: a, env: {A: a}}\n"
        "  r: &r {time: 2, account: r}\n"
        "  q:\n    <<: [*p, *r]\n    qos: q\n"
    )
    assert values(profile.settings) == {"qos": "q", "time": "1", "account": "r"}
    assert values(profile.env) == {"A": "a"}
    # Where the value stands, not where it is taken in.
    assert profile.settings["account"].origin == f"profile q ({file}:4)"
    assert profile.env["A"].origin == f"profile q ({file}:3)"


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory(
    loaded: Callable[[str], Profile], file: Path
) -> None:
    levels = "".join(f", &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))
    with pytest.raises(GpusubError, match="too large for a file of settings"):
        loaded(f"profiles: [&a0 [{','.join('x' * 10)}]{levels}]\n")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0o17", "0o17"), ("1_000", "1_000"), ("2026-11-30", "2026-11-30"), ("+1", "+1"),
        ("Off", "Off"), ("12:30", "12:30"), ("a#b", "a#b"), ("'x # y'", "x # y"), (".5", ".5"),
        ("!!int 7", "7"), ("|-\n        a\n        b", "a\nb"), ("=", "="), ("''", ""),
    ],
)  # fmt: skip
def test_a_variable_is_the_text_that_stands_there(
    loaded: Callable[[str], Profile], written: str, value: str
) -> None:
    assert loaded(f"{ONE}    env:\n      A: {written}\n").env["A"].value == value


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("torchrun", "torchrun"),
        ("~/t.sh.j2", "~/t.sh.j2"),
        ("/etc/t.sh.j2", "/etc/t.sh.j2"),
        ("t.sh.j2", "{}/t.sh.j2"),
        ("site/t", "{}/site/t"),
    ],
)
def test_a_template_is_looked_for_beside_the_file_that_names_it(
    loaded: Callable[[str], Profile], file: Path, written: str, seen: str
) -> None:
    found = loaded(f"{ONE}    template: {written}\n").settings["template"].value
    assert found == seen.format(file.parent)


def blocks(profile: Profile) -> dict[str, dict[str, Any]]:
    return {name: values(block) for name, block in profile.fabrics.items()}


class TestFabricByNode:
    TWO = (
        f"{ONE}    fabric:\n      h100: {{type: infiniband, pkey: 1}}\n      ndr: {{type: roce}}\n"
    )

    def test_it_is_read_with_its_lines(self, loaded: Callable[[str], Profile], file: Path) -> None:
        profile = loaded(self.TWO)
        assert profile.fabric == {}
        assert blocks(profile) == {
            "h100": {"type": "infiniband", "pkey": 1},
            "ndr": {"type": "roce"},
        }
        assert profile.fabrics["ndr"]["type"].origin == f"profile p ({file}:6)"

    @pytest.mark.parametrize(
        ("written", "line", "problem"),
        [
            ("h100: {type: roce}\n      type: roce", 6, "type: stands beside h100, which has a"),
            ("type: roce\n      h100: {type: roce}", 5, "type: stands beside h100, which has a"),
            ("h100: {type: roce}\n      a100: x", 6, "a100: stands beside h100, which has a fab"),
            ("h100:\n        tpye: roce", 6, "h100.tpye: unknown key; did you mean 'type'?"),
            ("h100:\n        type: ib", 6, "h100.type: 'ib' is none of infiniband, roce"),
            ("h100:\n        pkey: 010", 6, "h100.pkey: expected a plain number, got '010'"),
            ("h100:\n        hcas: mlx5_0", 6, "h100.hcas: expected a list, got a text; write a"),
            ("'h 100': {type: roce}", 5, "h 100: no GPU type and no node feature of Slurm's"),
            ("hcas: {a: b}", 5, "hcas: expected a list, got keys; write a list"),
            ("h100: roce", 5, "h100: unknown key; known keys: type, hcas"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_file_and_line(
        self, loaded: Callable[[str], Profile], file: Path, written: str, line: int, problem: str
    ) -> None:
        with pytest.raises(GpusubError) as refused:
            loaded(f"{ONE}    fabric:\n      {written}\n")
        assert str(refused.value).startswith(f"{file}:{line}: profiles.p.fabric.{problem}")

    @pytest.mark.parametrize(
        ("later", "fabric", "fabrics"),
        [
            ("{h100: {pkey: 2}}", {}, {"h100": {"type": "infiniband", "pkey": 2},
                                       "ndr": {"type": "roce"}}),
            ("{a100: {pkey: 2}, h100: }", {}, {"h100": {}, "ndr": {"type": "roce"},
                                               "a100": {"pkey": 2}}),
            # For all nodes, and so also over what a file below says of some.
            ("{pkey: 2}", {"pkey": 2}, {"h100": {"type": "infiniband"}, "ndr": {"type": "roce"}}),
            ("~", {}, {}),
        ],
    )  # fmt: skip
    def test_a_later_file_wins_key_by_key(
        self,
        tmp_path: Path,
        later: str,
        fabric: dict[str, object],
        fabrics: dict[str, object],
    ) -> None:
        site, user = tmp_path / "site", tmp_path / "user"
        site.write_text(self.TWO)
        user.write_text(f"profiles: {{p: {{fabric: {later}}}}}\n")
        profile = load([site, user], None)
        assert (values(profile.fabric), blocks(profile)) == (fabric, fabrics)


@pytest.mark.parametrize(
    "content", ["profiles: &a\n  p: *a\n", "profiles: &a\n  p: {env: *a}\n", "profiles: &a [*a]\n"]
)
def test_an_anchor_within_itself_is_refused(
    loaded: Callable[[str], Profile], file: Path, content: str
) -> None:
    with pytest.raises(GpusubError, match="an alias stands within what it stands for") as refused:
        loaded(content)
    assert str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [(ONE.encode() + b"    time: '1\xff'\n", 4), ("\ufeffprofiles:\n".encode("utf-16"), 1)],
)
def test_another_encoding_is_refused_with_its_line(file: Path, content: bytes, line: int) -> None:
    file.write_bytes(content)
    with pytest.raises(GpusubError) as refused:
        load([file], None)
    assert str(refused.value).startswith(f"{file}:{line}: not in UTF-8: ")


@pytest.mark.usefixtures("nobody")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpusubError, match=r"^/etc/shadow: cannot be read: Permission denied$"):
        load([Path("/etc/shadow")], None)


def test_a_directory_in_its_place_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(GpusubError) as refused:
        load([file], None)
    assert str(refused.value) == f"{file}: cannot be read: Is a directory"


def test_a_file_that_is_gone_by_now_is_none(file: Path) -> None:
    assert load([file, file / "below"], None) == Profile()


class TestLayers:
    @pytest.fixture
    def layers(self, tmp_path: Path) -> Callable[..., Profile]:
        def read(*contents: str, asked: Value[str] | None = None) -> Profile:
            files = [tmp_path / name for name in ("site", "user", "project")]
            for path, content in zip(files, contents, strict=True):
                path.write_text(content)
            return load(files, asked)

        return read

    def test_later_files_win_key_by_key(
        self, layers: Callable[..., Profile], tmp_path: Path
    ) -> None:
        profile = layers(
            f"{ONE}    {{partition: a, account: a, time: 1, fabric: {{type: roce, pkey: 1}}, "
            "env: {A: a, B: a}}\n",
            "profiles: {p: {account: b, time: ~, fabric: {pkey: 2}}}\n",
            "profiles: {p: {account: c, env: {B: c}}}\n",
        )
        site, user, project = (
            f"profile p ({tmp_path / name}:{line})"
            for name, line in (("site", 4), ("user", 1), ("project", 1))
        )
        assert profile.settings == {
            "partition": Value("a", site),
            "account": Value("c", project),
            "time": Value(None, user),
        }
        assert profile.fabric == {"type": Value("roce", site), "pkey": Value(2, user)}
        assert profile.env == {"A": Value("a", site), "B": Value("c", project)}

    def test_nothing_behind_fabric_or_env_takes_all_of_it_back(
        self, layers: Callable[..., Profile]
    ) -> None:
        below = f"{ONE}    {{fabric: {{pkey: 1}}, env: {{A: a}}}}\n"
        profile = layers(below, "profiles: {p: {fabric: , env: }}\n", "")
        assert (profile.fabric, profile.env) == ({}, {})
        profile = layers(
            below, "profiles: {p: {fabric: ~}}\n", "profiles: {p: {fabric: {pkey: 2}}}"
        )
        assert values(profile.fabric) == {"pkey": 2}
        assert values(profile.env) == {"A": "a"}

    def test_the_last_default_profile_wins(self, layers: Callable[..., Profile]) -> None:
        both = "profiles: {p: {time: 1}, q: {time: 2}}\n"
        assert layers(f"default_profile: p\n{both}", "default_profile: q\n", "").name == "q"
        assert layers("default_profile: p\n", both, "default_profile: ~\n").name == "p"

    def test_the_profile_asked_for_wins(self, layers: Callable[..., Profile]) -> None:
        profile = layers(
            f"{ONE}    time: 1\n", "profiles: {q: {time: 2}}\n", "", asked=Value("q", "x")
        )
        assert (profile.name, values(profile.settings)) == ("q", {"time": "2"})

    def test_an_unknown_profile_is_refused_with_those_that_are(
        self, layers: Callable[..., Profile]
    ) -> None:
        with pytest.raises(GpusubError) as refused:
            layers(ONE, "profiles: {q: }\n", "", asked=Value("r", "--profile"))
        assert str(refused.value) == "--profile: no profile 'r'; there is p, q"
