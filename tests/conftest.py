"""Fixtures for every test that needs Slurm: one cluster a session, clean for each test.

GPUSUB_CLUSTER_ROOT names the directory with the system, and so the version of Slurm, that the
clusters run; by default it is this machine's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

import pytest

from cluster import Cluster, ClusterError, CommandError, what_is_missing

ClusterFactory = Callable[..., Cluster]

ROOT = os.environ.get("GPUSUB_CLUSTER_ROOT", "/")


def _require_cluster() -> None:
    """Skip where there can't be a cluster, unless the tests are told that there has to be one."""
    reason = what_is_missing(ROOT)
    if not reason:
        return
    if os.environ.get("CI") == "true" or os.environ.get("GPUSUB_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    _require_cluster()
    with Cluster(root=ROOT) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """The session's cluster, as if just started."""
    try:
        _cluster.reset()
    except (ClusterError, CommandError, TimeoutError):
        # This test fails with that error; the next ones get a new cluster.
        _cluster.stop()
        _cluster.start()
        raise
    return _cluster


@pytest.fixture
def clusters() -> Iterator[ClusterFactory]:
    """Starts further clusters, with Cluster's arguments; they end with the test."""
    _require_cluster()
    started: list[Cluster] = []

    def start(**options: object) -> Cluster:
        cluster = Cluster(**{"root": ROOT, **options})  # type: ignore[arg-type]
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of slurmctld's log under a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster) and cluster.is_running:
        report.sections.append(("slurmctld", cluster.controller.log_tail(40)))
    return report
