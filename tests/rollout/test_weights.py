import numpy as np
import pytest

from jppo.config import UserError
from jppo.rollout import weights
from jppo.rollout.buffers import Buffers
from jppo.rollout.endpoint import Endpoint
from jppo.rollout.sampler import RolloutError

TENSORS = {"w": np.arange(4, dtype=np.float32)}
SWAP = ["jppo_check", "/pause?mode=wait", "jppo_load", "/update_weight_version", "/resume"]


@pytest.fixture
def buffers():
    made = Buffers("")
    yield made
    made.close()


def endpoints(fakes):
    return [Endpoint(fake.url, timeout_s=5.0, why=str) for fake in fakes]


def test_the_order_of_a_publish(fakes, buffers):
    weights.publish(endpoints(fakes), buffers, TENSORS.items(), 7)
    for fake in fakes:
        assert fake.asked == SWAP
        assert fake.bodies[0]["kwargs"]["version"] == 7
        assert fake.bodies[0]["kwargs"]["entries"][0][:3] == ["w", "float32", [4]]
        assert fake.bodies[3] == {"new_version": "7"}


def test_a_refusal_by_one_server_touches_none(fakes, buffers):
    fakes[1].answers["jppo_check"] = (200, {"results": [{"ok": False, "error": "w has shape [4]"}]})
    with pytest.raises(RolloutError, match=rf"{fakes[1].url} refused version 7 of the weights: w has shape"):
        weights.publish(endpoints(fakes), buffers, TENSORS.items(), 7)
    assert fakes[0].asked == fakes[1].asked == ["jppo_check"]
    fakes[1].answers["jppo_check"] = fakes[0].answers["jppo_check"]
    weights.publish(endpoints(fakes), buffers, TENSORS.items(), 7)
    assert fakes[1].asked == ["jppo_check", *SWAP]


def test_a_refusal_by_one_worker_of_several_counts(fakes, buffers):
    results = [{"ok": True, "error": None}, {"ok": False, "error": "w missing"}]
    fakes[0].answers["jppo_check"] = (200, {"results": results})
    with pytest.raises(RolloutError, match="w missing"):
        weights.publish(endpoints(fakes[:1]), buffers, TENSORS.items(), 1)


def test_a_failure_in_the_swap_itself_leaves_the_server_paused(fakes, buffers):
    fakes[0].answers["jppo_load"] = (500, {"error": "boom"})
    with pytest.raises(RolloutError, match=r"500.*boom.*must be started again"):
        weights.publish(endpoints(fakes[:1]), buffers, TENSORS.items(), 1)
    assert fakes[0].asked == SWAP[:3]


ADAPTER_ROUTES = ["/v1/load_lora_adapter", "/update_weight_version"]


def write_adapter(path):
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


@pytest.fixture
def with_adapters(fakes):
    for fake in fakes:
        fake.answers |= dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), (200, "Success"))
    return fakes


def test_every_server_gets_each_version_of_the_adapters_under_its_own_name(with_adapters, tmp_path):
    adapters = weights.Adapters(str(tmp_path))
    adapters.publish(endpoints(with_adapters), write_adapter, 3)
    first = adapters.name
    assert [path.name for path in tmp_path.iterdir()] == [first]
    adapters.publish(endpoints(with_adapters), write_adapter, 4)
    for fake in with_adapters:
        assert fake.asked == [*ADAPTER_ROUTES, *ADAPTER_ROUTES, "/v1/unload_lora_adapter"]
        assert fake.bodies[0] == {"lora_name": first, "lora_path": str(tmp_path / first)}
        assert fake.bodies[1] == {"new_version": "3"} and fake.bodies[-1] == {"lora_name": first}
    assert adapters.name != first and [path.name for path in tmp_path.iterdir()] == [adapters.name]


def test_adapters_that_a_server_refuses_are_not_asked_for(with_adapters, tmp_path):
    adapters = weights.Adapters(str(tmp_path))
    adapters.publish(endpoints(with_adapters), write_adapter, 1)
    last = adapters.name
    with_adapters[-1].answers["/v1/load_lora_adapter"] = (400, {"error": "rank 99 is too large"})
    with pytest.raises(RolloutError, match="rank 99"):
        adapters.publish(endpoints(with_adapters), write_adapter, 2)
    assert adapters.name == last


def test_adapters_that_cannot_be_written_are_an_error_of_the_folder(with_adapters, tmp_path):
    adapters = weights.Adapters(str(tmp_path / "gone"))
    with pytest.raises(UserError, match="publish_dir"):
        adapters.publish(endpoints(with_adapters), write_adapter, 1)
