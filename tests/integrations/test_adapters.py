"""Adapters of models of transformers, beside those of peft."""

import copy

import pytest
import torch
from torch import nn

from pairmix import adapters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
TARGETS = {"gpt2": ["attn.c_attn", "mlp.c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}


def make(kind):
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **SMALL)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **SMALL
    )
    return transformers.LlamaForCausalLM(config).eval()


def turn(model, std=0.3):
    for parameter in adapters.parameters(model):
        nn.init.normal_(parameter, std=std)


def logits(model, text):
    with torch.no_grad():
        return model(text).logits


@pytest.fixture(params=TARGETS)
def kind(request):
    return request.param


@pytest.fixture
def text():
    return torch.randint(50, (2, 9))


def test_the_model_computes_the_same_before_training(kind, text):
    model = make(kind)
    before = logits(model, text)
    added = adapters.add(model, TARGETS[kind])
    assert len(added) == 2 * len(TARGETS[kind])
    assert torch.equal(logits(model, text), before)


def test_merging_and_saving_as_a_model_of_its_own(kind, text, tmp_path):
    model = make(kind)
    adapters.add(model, TARGETS[kind])
    turn(model)
    adapted = logits(model, text)
    adapters.merge_(model, remove=True)
    torch.testing.assert_close(logits(model, text), adapted)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path), text), adapted)


def test_generation_with_a_cache_is_that_without(kind, text):
    model = make(kind)
    adapters.add(model, TARGETS[kind])
    turn(model, std=1.0)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = [model.generate(text, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*written)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(kind, text, use_reentrant):
    model = make(kind)
    adapters.add(model, TARGETS[kind])
    turn(model)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def gradients():
        model.zero_grad()
        model(text, labels=text).loss.backward()
        return [parameter.grad.clone() for parameter in adapters.parameters(model)]

    expected = gradients()
    assert all(gradient.any() for gradient in expected)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:  # which needs an input that requires gradients
        model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), expected)


def test_a_bfloat16_model_keeps_its_dtype(kind, text):
    model = make(kind).bfloat16()
    adapters.add(model, TARGETS[kind])
    turn(model)
    assert logits(model, text).dtype == torch.bfloat16
    model(text, labels=text).loss.backward()
    assert {parameter.grad.dtype for parameter in adapters.parameters(model)} == {torch.float32}


def test_the_file_alone_makes_the_same_model(kind, text, tmp_path):
    model = make(kind)
    plain = copy.deepcopy(model)
    adapters.add(model, TARGETS[kind], scale=True, where="output")
    turn(model)
    adapters.save(model, tmp_path / "adapter.safetensors")
    adapters.load(plain, tmp_path / "adapter.safetensors")
    assert torch.equal(logits(plain, text), logits(model, text))


def test_tied_heads_are_not_merged(text):
    model = make("gpt2")
    adapters.add(model, ["lm_head"])
    with pytest.raises(ValueError, match=r"the weight of lm_head is also read elsewhere, in transformer\.wte"):
        adapters.merge_(model)


def test_beside_lora_of_peft(text):
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.eval()
    before = logits(model, text)
    lora = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    adapters.add(model, ["q_proj", "down_proj"], keep_trainable=lambda name, parameter: "lora_" in name)
    assert torch.equal(logits(model, text), before)
    turn(model)
    model(text, labels=text).loss.backward()
    assert all(parameter.grad.any() for parameter in [*lora, *adapters.parameters(model)])
    with pytest.raises(ValueError, match="has no parameter `weight`"):
        adapters.merge_(model)
