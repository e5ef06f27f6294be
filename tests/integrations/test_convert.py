"""Models of transformers become SPM models: they train, generate, are saved, loaded and resumed."""

import copy
import warnings

import pytest
import torch

import pairmix
from pairmix import SPMFeedForward, SPMLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TOKENS = {"vocab_size": 100, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=40, pad_token_id=0, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, **TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, hidden_dropout_prob=0.0)
    ),
}  # fmt: skip
REPLACED = {"gpt2": 8, "llama": 14, "bert": 13, "t5": 32, "vit": 12}
BLOCKS = {"gpt2": 2, "llama": 2, "bert": 0, "t5": 4, "vit": 2}  # BERT's are spread over two modules
GENERATING = ("gpt2", "llama", "t5")


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def batch_of(name):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, 100, (2, 8))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def converted(name):
    model = MODELS[name]()
    report = pairmix.convert_(model)
    return model, report


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def test_all_maps_but_the_head_are_replaced(name):
    model, report = converted(name)
    assert len(report.replaced) == REPLACED[name]
    assert [one.why for one in report.left] == ["the output head"]
    assert sum(isinstance(module, SPMLinear) for module in model.modules()) == REPLACED[name]


def test_it_starts_at_a_loss_like_that_of_the_dense_model_and_every_parameter_learns(name):
    model, batch = MODELS[name](), batch_of(name)
    before = model(**batch).loss.item()
    pairmix.convert_(model)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() < before + 0.5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_can_be_saved_loaded_and_resumed(name, tmp_path):
    model, _ = converted(name)
    optimizer = torch.optim.AdamW(pairmix.param_groups(model, lr=1e-3))
    batches = [batch_of(name) for _ in range(4)]
    for batch in batches[:2]:
        step(model, optimizer, batch)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    expected = [step(model, optimizer, batch) for batch in batches[2:]]

    resumed, _ = converted(name)
    optimizer = torch.optim.AdamW(pairmix.param_groups(resumed, lr=1e-3))
    saved = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert [step(resumed, optimizer, batch) for batch in batches[2:]] == pytest.approx(expected, rel=1e-4)


def test_going_back_it_is_the_stock_model_again(name):
    model, batch = MODELS[name]().eval(), batch_of(name)
    state = {key: value.shape for key, value in model.state_dict().items()}
    pairmix.convert_(model)
    with torch.no_grad():
        before = model(**batch).logits
        pairmix.restore_(model)
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-4)
    assert {key: value.shape for key, value in model.state_dict().items()} == state
    MODELS[name]().load_state_dict(model.state_dict())


@pytest.mark.parametrize("trained", [False, True])
def test_fitted_to_maps_that_are_spms_it_computes_the_same(name, trained):
    model, batch = MODELS[name]().eval(), batch_of(name)
    # All blocks of new layers are alike, and those with more outputs than inputs cannot be told apart then.
    fitted = {} if trained else {"filter_fn": lambda module, _: len(set(module.weight.shape)) == 1}
    pairmix.convert_(model, **fitted)
    if trained:
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, SPMLinear):
                    layer.coeffs.add_(0.3 * torch.randn_like(layer.coeffs))
    pairmix.restore_(model)
    with torch.no_grad():
        before = model(**batch).logits
        report = pairmix.convert_(model, **fitted, weights="fit")
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-4)
    assert len(report.replaced) == REPLACED[name] or not trained
    assert all(one.error < 1e-5 for one in report.replaced)


@pytest.mark.parametrize("name", GENERATING)
def test_it_generates_with_a_cache_what_it_generates_without(name):
    model, _ = converted(name)
    model.eval()
    tokens = batch_of(name)["input_ids"]
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated = [model.generate(tokens, **settings, use_cache=use_cache) for use_cache in (True, False)]
    torch.testing.assert_close(*generated)


def test_it_compiles_with_whole_graphs():
    model, _ = converted("gpt2")
    model.eval()
    tokens = batch_of("gpt2")["input_ids"]
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_half_precision_of_t5_reads_the_dtype_of_a_weight():
    model, _ = converted("t5")
    model = model.to(torch.bfloat16)
    assert model(**batch_of("t5")).logits.dtype == torch.bfloat16


def with_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return model


class TestWholeBlocks:
    def test_the_model_computes_what_it_does_with_its_layers_one_by_one(self, name):
        whole, batch = with_dropout(MODELS[name]()), batch_of(name)
        one_by_one = copy.deepcopy(whole)
        losses, gradients = [], []
        for model, options in ((whole, {"feed_forward": True}), (one_by_one, {})):
            torch.manual_seed(1)
            pairmix.convert_(model, **options)
            model.double()
            loss = model(**{key: one.double() if one.is_floating_point() else one for key, one in batch.items()}).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append({key: one.grad for key, one in model.named_parameters()})
        assert sum(isinstance(module, SPMFeedForward) for module in whole.modules()) == BLOCKS[name]
        # In float64, where anything but rounding stands out.
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        common = gradients[0].keys() & gradients[1].keys()  # of all that is around the blocks
        assert len(common) > 10
        torch.testing.assert_close(*({key: of[key] for key in common} for of in gradients), rtol=1e-8, atol=1e-10)

    def test_going_back_it_is_the_stock_model_again(self, name):
        model, batch = MODELS[name]().eval(), batch_of(name)
        stock = {key: type(module) for key, module in model.named_modules()}
        pairmix.convert_(model, feed_forward=True)
        with torch.no_grad():
            before = model(**batch).logits
            pairmix.restore_(model)
            torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-4)
        assert {key: type(module) for key, module in model.named_modules()} == stock
        MODELS[name]().load_state_dict(model.state_dict())

    def test_checkpoints_and_copies(self, name, tmp_path):
        model, batch = MODELS[name]().eval(), batch_of(name)
        pairmix.convert_(model, feed_forward=True)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        torch.save(model, tmp_path / "pickled.pt")
        loaded = MODELS[name]().eval()
        pairmix.convert_(loaded, feed_forward=True)
        loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
        pickled = torch.load(tmp_path / "pickled.pt", weights_only=False)
        with torch.no_grad():
            expected = model(**batch).logits
            for one in (loaded, pickled, copy.deepcopy(model)):
                assert torch.equal(one(**batch).logits, expected)

    @pytest.mark.parametrize("name", GENERATING)
    def test_it_generates(self, name):
        model = MODELS[name]().eval()
        pairmix.convert_(model, feed_forward=True)
        tokens = batch_of(name)["input_ids"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generated = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False
            )
        assert generated.shape[0] == 2

    def test_the_gated_block_of_t5(self):
        config = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
        model = transformers.T5EncoderModel(transformers.T5Config(**config, feed_forward_proj="gated-gelu"))
        (one,) = [one for one in pairmix.convert_(model, head=True, feed_forward=True).replaced if "Dense" in one.name]
        assert (one.before, one.after) == ("T5DenseGatedActDense", "SPMFeedForward")
        block = model.get_submodule(one.name)
        assert (block.activation, block.gated, block.dropout.p) == ("gelu_tanh", True, 0.1)
