"""Dense language models (without experts)."""

from __future__ import annotations

from .made import Made, causal, numbers, pictures


def gpt2() -> Made:
    from transformers import GPT2Config

    return causal(GPT2Config(n_layer=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), 8, 1024)


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    tokens = numbers(30522, 32, 512)
    config = BertConfig(num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=51865,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), {
        "input_features": pictures(24, 80, 3000),
        "labels": numbers(51865, 24, 448),
    }


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_kv=64, d_ff=2048, num_layers=4, num_heads=12, dropout_rate=0.0, decoder_start_token_id=0
    )
    tokens = numbers(32128, 32, 512)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def llama() -> Made:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    return causal(config, 2, 4096)


def gemma3() -> Made:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=32768,
    )  # fmt: skip
    return causal(config, 4, 2048)


def mamba2() -> Made:
    """Makes Mamba 2 without the kernels of mamba_ssm: PyTorch computes the scans in chunks."""
    from transformers import Mamba2Config

    config = Mamba2Config(
        hidden_size=768, num_heads=24, head_dim=64, state_size=64, n_groups=1, chunk_size=128, num_hidden_layers=2,
        vocab_size=50288,
    )  # fmt: skip
    return causal(config, 2, 2048)
