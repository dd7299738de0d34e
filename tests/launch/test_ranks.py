"""The environment of each rank, from where the ranks run."""

from tutti.launch.cluster.ranks import RankPlace, environments, on_one_machine, order


def test_ranks_of_a_node_follow_one_another():
    places = [
        RankPlace("b", "10.0.0.2"),
        RankPlace("a", "10.0.0.1"),
        RankPlace("b", "10.0.0.2"),
        RankPlace("a", "10.0.0.1"),
    ]
    assert order(places) == [0, 2, 1, 3]


def test_each_rank_has_the_variables_of_torchrun():
    places = [RankPlace("a", "10.0.0.1", ("0", "3")), RankPlace("a", "10.0.0.1", ("5",)), RankPlace("b", "10.0.0.2")]
    variables = environments(places, 1234, 2, 5, "demo")
    shown = [(x["RANK"], x["LOCAL_RANK"], x["LOCAL_WORLD_SIZE"], x["GROUP_RANK"]) for x in variables]
    assert shown == [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "0", "1", "1")]
    assert {(x["MASTER_ADDR"], x["MASTER_PORT"], x["WORLD_SIZE"]) for x in variables} == {("10.0.0.1", "1234", "3")}
    assert [x.get("CUDA_VISIBLE_DEVICES") for x in variables] == ["0,3,5", "0,3,5", None]
    assert {(x["TORCHELASTIC_RESTART_COUNT"], x["TORCHELASTIC_MAX_RESTARTS"]) for x in variables} == {("2", "5")}


def test_one_machine_meets_at_its_loopback():
    here = [RankPlace("a", "10.0.0.1"), RankPlace("a", "10.0.0.1")]
    assert [x.address for x in on_one_machine(here)] == ["127.0.0.1"] * 2
    several = [*here, RankPlace("b", "10.0.0.2")]
    assert on_one_machine(several) == several
