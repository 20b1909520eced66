from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpuslurm.client import Inventory, NodeKind, Partition
from gpusub.errors import GpusubError
from gpusub.profile import Profile
from gpusub.request import Nodes, Request, Value
from gpusub.resources import (
    Machine,
    Resources,
    choose_partitions,
    clock,
    local_resources,
    setting,
    slurm_resources,
    summary,
)

GPU = Partition("gpu", True, "UP", 4)
H100 = NodeKind("gpu", "gpu-[001-004]", 4, 192, 2, 2_000_000, 8, frozenset({"h100", "ndr"}))
A100 = replace(H100, names="old[1-2]", count=2, gpus=4, features=frozenset({"a100"}))

Make = Callable[..., Any]


@pytest.fixture
def resources_of(
    request_of: Callable[..., Request], profile_of: Callable[..., Profile]
) -> Callable[..., Resources]:
    def make(
        *kinds: NodeKind,
        partitions: tuple[Partition, ...] = (GPU,),
        profile: dict[str, Any] | None = None,
        nodes: str = "1",
        exclusive: str | None = None,
        defaults: dict[str, int] | None = None,
        **settings: str,
    ) -> Resources:
        least, _, most = nodes.partition("-")
        asked = Value(Nodes(int(least), int(most or least)), "option --nodes")
        facts = inventory_of(partitions, kinds or (H100,), **(defaults or {}))
        request = request_of(settings=settings, nodes=asked, exclusive=exclusive)
        return slurm_resources(request, profile_of(**(profile or {})), facts, partitions)

    return make


def inventory_of(
    partitions: tuple[Partition, ...], kinds: tuple[NodeKind, ...], **defaults: int
) -> Inventory:
    from gpuslurm.client import Defaults

    return Inventory(partitions, kinds, Defaults(**defaults))


class TestGpus:
    def test_all_of_a_node_unless_said_otherwise(self, resources_of: Make) -> None:
        found = resources_of()
        assert found.gpus_per_node == Value(8, "all GPUs of a node, by Slurm")
        assert (found.workers, found.gpu_type) == (8, None)
        assert found.exclusive == Value(True, "all GPUs of a node")

    @pytest.mark.parametrize(
        ("asked", "gpus", "gpu_type", "exclusive"),
        [
            ("8", 8, None, True),
            ("4", 4, None, False),
            ("1", 1, None, False),
            ("h100:2", 2, "h100", False),
            ("a100_3g.20gb:8", 8, "a100_3g.20gb", True),
            ("08", 8, None, True),
        ],
    )
    def test_as_many_as_asked_for(
        self, resources_of: Make, asked: str, gpus: int, gpu_type: str | None, exclusive: bool
    ) -> None:
        found = resources_of(gpus_per_node=asked)
        assert found.gpus_per_node == Value(gpus, "option --gpus-per-node")
        assert (found.gpu_type, found.exclusive.value) == (gpu_type, exclusive)

    @pytest.mark.parametrize("asked", ["", "-1", "x", "h100", "h100:", ":8", "8:h100", "1.5", "٣"])
    def test_what_is_no_number_is_refused(self, resources_of: Make, asked: str) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(gpus_per_node=asked)
        assert str(refused.value) == (
            f"option --gpus-per-node: {asked!r} is no number of GPUs; write 8, or TYPE:8 as in "
            "h100:8"
        )

    def test_a_partition_whose_nodes_differ_wants_a_number(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(H100, A100, replace(H100, names="x", count=1))
        assert str(refused.value) == (
            "the nodes of partition gpu differ: 4 GPUs on 2 nodes, 8 GPUs on 5 nodes; "
            "say which with --gpus-per-node N"
        )

    def test_nodes_with_more_gpus_do_too_and_are_shared_then(self, resources_of: Make) -> None:
        found = resources_of(H100, A100, gpus_per_node="4")
        assert found.exclusive.value is False
        assert found.cpus_per_task.value == 96  # half of an H100 node, where A100 nodes give 192

    def test_a_constraint_says_which_nodes(self, resources_of: Make) -> None:
        assert resources_of(H100, A100, constraint="a100").gpus_per_node.value == 4
        assert resources_of(H100, A100, constraint="h100&ndr").gpus_per_node.value == 8
        assert resources_of(H100, A100, constraint="ndr,h100").gpus_per_node.value == 8

    def test_a_constraint_that_no_node_meets_is_refused(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(H100, A100, constraint="h100&a100")
        assert str(refused.value) == (
            "option --constraint: no node of partition gpu has 'h100&a100'; "
            "their features are a100, h100, ndr"
        )

    @pytest.mark.parametrize("constraint", ["[h100|a100]", "a100*2", "(a|b)&c", "h100|a100"])
    def test_a_constraint_with_more_to_it_is_slurms_to_judge(
        self, resources_of: Make, constraint: str
    ) -> None:
        assert resources_of(constraint=constraint).gpus_per_node.value == 8

    def test_no_gpus_at_all_is_refused(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(replace(H100, gpus=0))
        assert str(refused.value) == (
            "the nodes of partition gpu have no GPUs; choose another with --partition, "
            "or run on CPUs with --gpus-per-node 0"
        )

    def test_none_is_a_number_too(self, resources_of: Make) -> None:
        found = resources_of(replace(H100, gpus=0), gpus_per_node="0")
        assert (found.gpus_per_node.value, found.workers) == (0, 1)
        assert found.cpus_per_task == Value(192, "all CPUs of a node")
        assert found.exclusive == Value(True, "all CPUs of a node")
        found = resources_of(gpus_per_node="0", cpus_per_task="4")
        assert found.exclusive.value is False
        assert found.mem.value == f"{2_000_000 * 4 // 192}M"

    def test_a_profile_states_it_and_an_option_replaces_it(self, resources_of: Make) -> None:
        found = resources_of(profile={"gpus_per_node": "h100:4"})
        assert (found.gpus_per_node, found.gpu_type) == (Value(4, "profile p (site)"), "h100")
        assert resources_of(profile={"gpus_per_node": "4"}, gpus_per_node="2").workers == 2


class TestImpossible:
    def test_more_gpus_than_a_node_has(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(gpus_per_node="16")
        assert str(refused.value) == (
            "option --gpus-per-node: 16 GPUs a node, and no node of partition gpu has more than 8; "
            "use --nodes to have more GPUs"
        )

    def test_more_nodes_than_there_are(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(H100, A100, nodes="5", gpus_per_node="8")
        assert str(refused.value) == (
            "option --nodes: 5 nodes with 8 GPUs, and partition gpu has 4; ask for fewer"
        )
        assert resources_of(nodes="4").nodes.value == Nodes(4, 4)
        assert resources_of(nodes="2-9").nodes.value == Nodes(2, 9)  # what there is may do

    def test_more_nodes_than_a_job_may_have(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(partitions=(replace(GPU, max_nodes=2),), nodes="3")
        assert str(refused.value) == (
            "option --nodes: 3 nodes, and partition gpu lets a job have 2; ask for fewer"
        )
        assert resources_of(partitions=(replace(GPU, max_nodes=2),), nodes="2")
        roomy = (replace(GPU, max_nodes=2), replace(GPU, name="big"))
        assert resources_of(partitions=roomy, nodes="3").nodes.value.least == 3

    @pytest.mark.parametrize("time", ["2-00:00:01", "2-01", "UNLIMITED", "0"])
    def test_a_longer_time_than_a_job_may_have(self, resources_of: Make, time: str) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(partitions=(replace(GPU, max_time_s=172_800),), time=time)
        assert str(refused.value) == (
            f"option --time: {time} is longer than partition gpu lets a job run (2-00:00:00); "
            "ask for less"
        )

    def test_a_time_that_fits_one_of_the_partitions(self, resources_of: Make) -> None:
        both = (replace(GPU, max_time_s=60), replace(GPU, name="long"))
        assert resources_of(partitions=both, time="1-0")
        assert resources_of(partitions=(replace(GPU, max_time_s=172_800),), time="2-0")
        with pytest.raises(GpusubError, match=r"partitions gpu, long lets a job run \(02:00:00\)"):
            resources_of(partitions=(both[0], replace(both[1], max_time_s=7200)), time="1-0")

    def test_more_cpus_than_a_node_has(self, resources_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(cpus_per_task="193")
        assert str(refused.value) == (
            "option --cpus-per-task: 193 CPUs a node, and no node of partition gpu gives more than "
            "192; ask for fewer"
        )
        with pytest.raises(GpusubError, match=r"^profile p \(site\): 25 a GPU: 200 CPUs a node"):
            resources_of(profile={"cpus_per_gpu": 25})

    def test_more_cpus_than_the_partition_gives(self, resources_of: Make) -> None:
        # Slurm 22.05: "Requested node configuration is not available", and nothing of why.
        capped = (replace(GPU, max_cpus_per_node=32),)
        with pytest.raises(
            GpusubError, match=r"33 CPUs a node.* gives more than 32; ask for fewer"
        ):
            resources_of(partitions=capped, cpus_per_task="33")
        assert resources_of(partitions=(*capped, GPU), cpus_per_task="33")

    @pytest.mark.parametrize("asked", ["0", "-1", "x", "1.5", "", "٣"])
    def test_what_is_no_number_of_cpus(self, resources_of: Make, asked: str) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(cpus_per_task=asked)
        assert (
            str(refused.value) == f"option --cpus-per-task: {asked!r} is no number of CPUs a node"
        )

    def test_a_partition_without_nodes(self, resources_of: Make) -> None:
        for asked in ({}, {"gpus_per_node": "8"}, {"gpus_per_node": "0"}):
            with pytest.raises(GpusubError, match="partition gpu"):
                resources_of(replace(H100, partition="other"), **asked)


class TestCpus:
    def test_the_gpus_share_of_a_node_in_whole_cores(self, resources_of: Make) -> None:
        assert resources_of().cpus_per_task == Value(192, "8 GPUs' share of a node")
        assert resources_of(gpus_per_node="1").cpus_per_task.value == 24
        odd = replace(H100, cpus=190)
        assert resources_of(odd, gpus_per_node="1").cpus_per_task.value == 22  # 23.75
        assert resources_of(odd, gpus_per_node="3").cpus_per_task.value == 70  # 71.25
        assert resources_of(replace(odd, threads_per_core=1), gpus_per_node="3").cpus_per_task == (
            Value(71, "3 GPUs' share of a node")
        )

    def test_never_none(self, resources_of: Make) -> None:
        assert resources_of(replace(H100, cpus=4), gpus_per_node="1").cpus_per_task.value == 1

    def test_the_smallest_share_fits_every_node(self, resources_of: Make) -> None:
        small = replace(H100, names="small", cpus=64, threads_per_core=1)
        assert resources_of(H100, small, gpus_per_node="2").cpus_per_task.value == 16

    @pytest.mark.parametrize(
        ("where", "cpus", "origin"),
        [
            ({"cpus_per_task": "7"}, 7, "option --cpus-per-task"),
            ({"profile": {"cpus_per_gpu": 3}}, 6, "profile p (site): 3 a GPU"),
            (
                {
                    "partitions": (replace(GPU, def_cpu_per_gpu=5),),
                    "defaults": {"def_cpu_per_gpu": 6},
                },
                10,
                "Slurm: partition gpu: DefCpuPerGPU=5",
            ),
            (
                {"defaults": {"def_cpu_per_gpu": 6}},
                12,
                "Slurm: partition gpu: DefCpuPerGPU=6",
            ),
            (
                {"partitions": (replace(GPU, max_cpus_per_node=20),)},
                20,
                "Slurm: MaxCPUsPerNode of partition gpu",
            ),
            ({}, 48, "2 GPUs' share of a node"),
        ],
    )
    def test_who_says_so_first(
        self, resources_of: Make, where: dict[str, Any], cpus: int, origin: str
    ) -> None:
        found = resources_of(gpus_per_node="2", **where)
        assert found.cpus_per_task == Value(cpus, origin)

    def test_an_option_beats_the_profile_which_beats_slurm(self, resources_of: Make) -> None:
        slurm = {"defaults": {"def_cpu_per_gpu": 6}, "gpus_per_node": "2"}
        with_profile = {**slurm, "profile": {"cpus_per_gpu": 3}}
        assert resources_of(**with_profile).cpus_per_task.value == 6
        assert resources_of(**with_profile, cpus_per_task="7").cpus_per_task.value == 7
        assert resources_of(**slurm, profile={"cpus_per_gpu": None}).cpus_per_task.value == 12

    def test_partitions_that_differ_have_no_common_default(self, resources_of: Make) -> None:
        both = (replace(GPU, def_cpu_per_gpu=5), replace(GPU, name="other"))
        assert resources_of(partitions=both, gpus_per_node="2").cpus_per_task.value == 48
        same = {"def_cpu_per_gpu": 5}
        found = resources_of(partitions=both, gpus_per_node="2", defaults=same)
        assert found.cpus_per_task == Value(10, "Slurm: partitions gpu, other: DefCpuPerGPU=5")


class TestMemory:
    @pytest.mark.parametrize(
        ("where", "mem", "origin"),
        [
            ({"mem": "64G"}, "64G", "option --mem"),
            ({"mem": "0"}, "0", "option --mem"),
            ({"mem": "1000"}, "1000", "option --mem"),
            ({"mem": "1t"}, "1t", "option --mem"),
            ({"mem": ""}, None, "option --mem"),
            ({"profile": {"mem_per_gpu": "100G"}}, "200G", "profile p (site): 100G a GPU"),
            ({"profile": {"mem_per_gpu": "512"}}, "1024", "profile p (site): 512 a GPU"),
            (
                {
                    "partitions": (replace(GPU, def_mem_per_gpu_mb=5),),
                    "defaults": {"def_mem_per_gpu_mb": 6},
                },
                "10M",
                "Slurm: partition gpu: DefMemPerGPU=5",
            ),
            (
                {"defaults": {"def_mem_per_gpu_mb": 6}},
                "12M",
                "Slurm: partition gpu: DefMemPerGPU=6",
            ),
            (
                {"partitions": (replace(GPU, max_mem_per_node_mb=7),)},
                "7M",
                "Slurm: MaxMemPerNode of partition gpu",
            ),
            ({}, "500000M", "2 GPUs' share of a node"),
        ],
    )
    def test_who_says_so_first(
        self, resources_of: Make, where: dict[str, Any], mem: str | None, origin: str
    ) -> None:
        assert resources_of(gpus_per_node="2", **where).mem == Value(mem, origin)

    def test_a_whole_node_has_all_its_memory(self, resources_of: Make) -> None:
        assert resources_of().mem == Value("0", "all memory of a node")
        assert resources_of(profile={"shared": True}).mem.value == "2000000M"

    def test_a_cap_holds_for_a_whole_node_too(self, resources_of: Make) -> None:
        # --mem=0 would wait for ever then: MaxMemPerLimit.
        capped = (replace(GPU, max_mem_per_node_mb=64_000),)
        assert resources_of(partitions=capped).mem.value == "64000M"
        assert resources_of(partitions=(*capped, GPU)).mem.value == "64000M"

    def test_a_site_that_does_not_count_memory_is_asked_for_none(self, resources_of: Make) -> None:
        for gpus in ("8", "1"):
            found = resources_of(replace(H100, memory_mb=1), gpus_per_node=gpus)
            assert found.mem == Value(None, "Slurm states no memory for these nodes")

    @pytest.mark.parametrize("asked", ["64 G", "64GB", "1.5G", "-1", "all", "G", "100X", "٣"])
    def test_what_is_no_size_is_refused(self, resources_of: Make, asked: str) -> None:
        with pytest.raises(GpusubError) as refused:
            resources_of(mem=asked)
        assert str(refused.value) == f"option --mem: {asked!r} is no size; write 64G, or 0 for all"


class TestExclusive:
    def test_asked_for(self, resources_of: Make) -> None:
        found = resources_of(gpus_per_node="1", exclusive="option --exclusive")
        assert found.exclusive == Value(True, "option --exclusive")
        found = resources_of(profile={"shared": True}, exclusive="option --exclusive")
        assert found.exclusive.value is True

    def test_not_where_the_site_shares_its_nodes(self, resources_of: Make) -> None:
        found = resources_of(profile={"shared": True})
        assert found.exclusive == Value(False, "profile p (site)")
        assert resources_of(profile={"shared": False}).exclusive.value is True

    def test_not_where_slurm_would_refuse_it(self, resources_of: Make) -> None:
        # With MaxCPUsPerNode below a node's CPUs, Slurm 22.05 refuses --exclusive: "Requested
        # node configuration is not available".
        found = resources_of(partitions=(replace(GPU, max_cpus_per_node=32),))
        assert (found.gpus_per_node.value, found.exclusive.value) == (8, False)
        assert found.mem.value == "2000000M"
        assert resources_of(partitions=(replace(GPU, max_cpus_per_node=192),)).exclusive.value


class TestPartitions:
    def facts(self, *names: str) -> Inventory:
        return inventory_of(
            tuple(Partition(name.rstrip("*"), name.endswith("*"), "UP", 1) for name in names), ()
        )

    def chosen(
        self, request: Request, profile: Profile, facts: Inventory
    ) -> tuple[Value[str], list[str]]:
        value, partitions = choose_partitions(request, profile, facts)
        return value, [partition.name for partition in partitions]

    def test_slurms_default(self, request_of: Make) -> None:
        value, names = self.chosen(request_of(), Profile(), self.facts("a", "b*"))
        assert (value, names) == (Value("b", "Slurm's default partition"), ["b"])

    def test_without_a_default_one_must_be_named(self, request_of: Make) -> None:
        with pytest.raises(GpusubError) as refused:
            choose_partitions(request_of(), Profile(), self.facts("a", "b"))
        assert str(refused.value) == (
            "Slurm has no default partition; choose one with --partition: a, b"
        )

    def test_several(self, request_of: Make, profile_of: Make) -> None:
        request = request_of(settings={"partition": "a,c"})
        value, names = self.chosen(request, profile_of(partition="b"), self.facts("a", "b*", "c"))
        assert (value, names) == (Value("a,c", "option --partition"), ["a", "c"])
        value, names = self.chosen(request_of(), profile_of(partition="a"), self.facts("a", "b*"))
        assert (value, names) == (Value("a", "profile p (site)"), ["a"])

    @pytest.mark.parametrize(
        ("asked", "problem"),
        [
            ("gpuu", "no partition 'gpuu'; did you mean 'gpu'?"),
            ("gpu,x", "no partition 'x'; there is gpu, cpu"),
            ("", "no partition ''; there is gpu, cpu"),
            ("gpu,", "no partition ''; there is gpu, cpu"),
            ("gpu*", "no partition 'gpu*'; did you mean 'gpu'?"),
        ],
    )
    def test_an_unknown_one_is_refused(self, request_of: Make, asked: str, problem: str) -> None:
        request = request_of(settings={"partition": asked})
        with pytest.raises(GpusubError) as refused:
            choose_partitions(request, Profile(), self.facts("gpu*", "cpu"))
        assert str(refused.value) == f"option --partition: {problem}"


class TestHere:
    def test_all_gpus_and_cpus_of_this_machine(self, request_of: Make) -> None:
        found = local_resources(request_of(local=True), Profile(), Machine(2, 16))
        assert found.gpus_per_node == Value(2, "this machine")
        assert found.cpus_per_task == Value(16, "this machine")
        assert (found.mem.value, found.exclusive.value, found.workers) == (None, False, 2)
        assert local_resources(request_of(), Profile(), Machine(0, 4)).workers == 1

    def test_what_is_asked_for_and_not_what_the_cluster_has(
        self, request_of: Make, profile_of: Make
    ) -> None:
        cluster = profile_of(gpus_per_node="8", cpus_per_gpu=3)
        found = local_resources(request_of(), cluster, Machine(2, 16))
        assert (found.workers, found.cpus_per_task.value) == (2, 6)
        request = request_of(settings={"gpus_per_node": "1", "cpus_per_task": "2"})
        found = local_resources(request, cluster, Machine(2, 16))
        assert (found.workers, found.cpus_per_task.value) == (1, 2)

    def test_several_nodes_are_refused(self, request_of: Make) -> None:
        request = request_of(nodes=Value(Nodes(2, 4), "option --nodes"))
        with pytest.raises(GpusubError) as refused:
            local_resources(request, Profile(), Machine(2, 16))
        assert str(refused.value).startswith("option --nodes: 2-4 nodes need Slurm")
        request = request_of(nodes=Value(Nodes(1, 4), "option --nodes"))
        assert local_resources(request, Profile(), Machine(2, 16)).nodes.value == Nodes(1, 1)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "00:00:00"),
        (59, "00:00:59"),
        (86399, "23:59:59"),
        (86400, "1-00:00:00"),
        (93784, "1-02:03:04"),
    ],
)
def test_a_time_is_shown_as_slurm_shows_it(time_s: int, text: str) -> None:
    assert clock(time_s) == text


def test_a_setting_that_is_null_is_not_set(request_of: Make, profile_of: Make) -> None:
    assert setting(request_of(), profile_of(account=None), "account") is None
    request = request_of(settings={"account": ""})
    assert setting(request, profile_of(account="a"), "account") == Value("", "option --account")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ("1 node", "8 GPUs", "192 CPUs", "all memory")),
        ({"gpus_per_node": "h100:1"}, ("1 node", "1 h100 GPU", "24 CPUs", "244G memory")),
        ({"nodes": "1-2", "mem": ""}, ("1-2 nodes", "8 GPUs", "192 CPUs", "")),
        ({"mem": "64G"}, ("1 node", "8 GPUs", "192 CPUs", "64G memory")),
        ({"mem": "9999M"}, ("1 node", "8 GPUs", "192 CPUs", "9999M memory")),
        ({"mem": "10240M"}, ("1 node", "8 GPUs", "192 CPUs", "10G memory")),
        ({"mem": "123456"}, ("1 node", "8 GPUs", "192 CPUs", "123456 memory")),
        ({"nodes": "2", "gpus_per_node": "0"}, ("2 nodes", "0 GPUs", "192 CPUs", "all memory")),
    ],
)
def test_in_words(resources_of: Make, settings: dict[str, str], words: tuple[str, ...]) -> None:
    assert tuple(summary(resources_of(**settings)).values()) == words
