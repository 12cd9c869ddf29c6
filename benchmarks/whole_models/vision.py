"""Vision models."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .made import Made, hooked, numbers, pictures


class UNet(nn.Module):
    """Three levels of convolutions, with bilinear upsampling."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(
            nn.Conv2d(b + a, a, 3, padding=1) for a, b in ((2 * width, 4 * width), (width, 2 * width))
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        target, kept = x, []
        for i, layer in enumerate(self.down):
            x = F.silu(layer(x if i == 0 else F.avg_pool2d(x, 2)))
            kept.append(x)
        for layer, beside in zip(self.up, kept[-2::-1], strict=False):
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = F.silu(layer(torch.cat([x, beside], 1)))
        return F.mse_loss(self.head(x).float(), target.float())


def unet() -> Made:
    return UNet(), {"x": pictures(16, 3, 256, 256)}


class Deformable(nn.Module):
    """Deformable attention over three levels with grid_sample, as in the encoder of deformable DETR."""

    def __init__(self, width: int = 256, layers: int = 3, heads: int = 8, points: int = 4) -> None:
        super().__init__()
        self.heads, self.points, self.levels = heads, points, 3
        self.stem = nn.ModuleList(nn.Conv2d(3, width, 8 << level, 8 << level) for level in range(self.levels))
        places = heads * self.levels * points
        self.values, self.out = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))
        self.offsets = nn.ModuleList(nn.Linear(width, 2 * places) for _ in range(layers))
        self.weights = nn.ModuleList(nn.Linear(width, places) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def attend(self, i: int, x: Tensor, own: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """What each place of x, [B, places, width], reads from all levels around its own place, [places, 2]."""
        batch, count, _ = x.shape
        split = (batch, count, self.heads, self.levels, self.points)
        weights = self.weights[i](x).view(*split[:3], -1).softmax(-1).view(split)
        offsets = self.offsets[i](x).view(*split, 2)
        at = [
            2 * (own[:, None, None] + torch.stack([around[..., 0] / w, around[..., 1] / h], -1)) - 1
            for around, (h, w) in zip(offsets.unbind(3), sizes, strict=True)
        ]
        values = self.values[i](x).unflatten(-1, (self.heads, -1)).split([h * w for h, w in sizes], 1)
        read = [
            F.grid_sample(
                value.permute(0, 2, 3, 1).flatten(0, 1).unflatten(-1, size),
                places.transpose(1, 2).flatten(0, 1),
                padding_mode="zeros", align_corners=False,
            )
            for value, places, size in zip(values, at, sizes, strict=True)
        ]  # fmt: skip
        weights = weights.permute(0, 2, 1, 3, 4).flatten(0, 1)
        found = (torch.stack(read, 3) * weights[:, None]).sum((3, 4))
        return self.out[i](found.unflatten(0, (batch, self.heads)).flatten(1, 2).mT)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        maps = [layer(x) for layer in self.stem]
        sizes = [(m.shape[2], m.shape[3]) for m in maps]
        rows = torch.cat([m.flatten(2).mT for m in maps], 1)
        axes = [[(torch.arange(n, device=x.device) + 0.5) / n for n in size] for size in sizes]
        own = torch.cat([torch.cartesian_prod(*axis).flip(-1) for axis in axes]).to(x.dtype)
        for i, mlp in enumerate(self.mlp):
            rows = rows + self.attend(i, rows, own, sizes)
            rows = rows + mlp(rows)
        return rows.float().square().mean()


def deformable() -> Made:
    return Deformable(), {"x": pictures(8, 3, 512, 512)}


def segmentation() -> Made:
    """Makes a model whose logits of 150 classes per pixel come from bilinear upsampling of feature maps and logits."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=(2, 2, 2, 2), hidden_sizes=(64, 128, 320, 512), num_labels=150, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    pixels = pictures(8, 3, 512, 512)
    return hooked(SegformerForSemanticSegmentation(config), pixels[:1, :, :64, :64]), {
        "pixel_values": pixels,
        "labels": numbers(150, 8, 512, 512),
    }


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=6, num_labels=1000)
    return ViTForImageClassification(config), {"pixel_values": pictures(64, 3, 224, 224), "labels": numbers(1000, 64)}


class DiT(nn.Module):
    """A diffusion transformer that predicts the noise in images; time step and class scale its layers."""

    def __init__(
        self, width: int = 768, layers: int = 6, patch: int = 2, channels: int = 4, classes: int = 1000
    ) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.classes = nn.Embedding(classes, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.scales = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.last = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, channels * patch**2)

    def forward(self, noisy: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Tensor:
        rates = time[:, None] * 10000 ** -torch.linspace(0, 1, 128, device=time.device)
        given = self.time(torch.cat([rates.cos(), rates.sin()], -1).to(noisy.dtype)) + self.classes(label)
        given = F.silu(given)[:, None]
        x = self.patches(noisy).flatten(2).mT
        norm = (self.width,)
        for scales, qkv, out, mlp in zip(self.scales, self.qkv, self.out, self.mlp, strict=True):
            shift, scale, gate, shift2, scale2, gate2 = scales(given).chunk(6, -1)
            y = F.layer_norm(x, norm) * (1 + scale) + shift
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in qkv(y).chunk(3, -1))
            x = x + gate * out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + gate2 * mlp(F.layer_norm(x, norm) * (1 + scale2) + shift2)
        shift, scale = self.last(given).chunk(2, -1)
        x = self.head(F.layer_norm(x, norm) * (1 + scale) + shift)
        return F.mse_loss(F.pixel_shuffle(x.mT.unflatten(-1, self.sides(noisy)), self.patch).float(), noise.float())

    def sides(self, x: Tensor) -> tuple[int, int]:
        """Returns the number of patches along each side of an image."""
        return x.shape[2] // self.patch, x.shape[3] // self.patch


def dit() -> Made:
    shape = (64, 4, 32, 32)
    return DiT(), {
        "noisy": pictures(*shape),
        "noise": pictures(*shape),
        "time": torch.rand(shape[0]) * 1000,
        "label": numbers(1000, shape[0]),
    }


def llava() -> Made:
    """Makes a language model that reads an image of 576 patches before each text."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    picture = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=12, image_size=336,
        patch_size=14,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32064, use_cache=False,
    )  # fmt: skip
    config = LlavaConfig(vision_config=picture, text_config=text)
    tokens = numbers(32000, 8, 1024)
    tokens[:, 1:577] = config.image_token_id
    pixels = pictures(8, 3, 336, 336)
    return hooked(LlavaForConditionalGeneration(config), pixels[:1], input_ids=tokens[:1]), {
        "input_ids": tokens,
        "pixel_values": pixels,
        "labels": tokens,
    }
