"""After lucidrains/denoising-diffusion-pytorch: a Trainer with Accelerate and EMA that samples and saves milestones."""

import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from zoo.public import Result
from zoo.public.data import digits, save_image, sliced_wasserstein


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        for data in dl:
            yield data


def num_to_groups(num, divisor):
    groups, remainder = divmod(num, divisor)
    return [divisor] * groups + ([remainder] if remainder > 0 else [])


def normalize_to_neg_one_to_one(img):
    return img * 2 - 1


def unnormalize_to_zero_to_one(t):
    return (t + 1) * 0.5


def extract(a, t, x_shape):
    out = a.gather(-1, t)
    return out.reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half_dim = self.dim // 2
        freqs = torch.exp(torch.arange(half_dim, device=x.device) * -(math.log(10000) / (half_dim - 1)))
        angles = x[:, None] * freqs[None, :]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_emb_dim, groups=4):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.proj1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.proj2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm1(self.proj1(x)) * (scale + 1) + shift)
        h = F.silu(self.norm2(self.proj2(h)))
        return h + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim, channels=1):
        super().__init__()
        self.channels = channels
        time_dim = dim * 4
        self.init_conv = nn.Conv2d(channels, dim, 3, padding=1)
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.down = ResnetBlock(dim, dim, time_dim)
        self.downsample = nn.Conv2d(dim, dim * 2, 4, 2, 1)
        self.mid = ResnetBlock(dim * 2, dim * 2, time_dim)
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim * 2, dim, 3, padding=1)
        )
        self.up = ResnetBlock(dim * 2, dim, time_dim)
        self.final_conv = nn.Conv2d(dim * 2, channels, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time)
        h = self.down(x, t)
        x = self.upsample(self.mid(self.downsample(h), t))
        x = self.up(torch.cat((x, h), dim=1), t)
        return self.final_conv(torch.cat((x, r), dim=1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, *, image_size, timesteps=100):
        super().__init__()
        self.model, self.image_size, self.channels = model, image_size, model.channels
        betas = torch.linspace(1e-4 * 1000 / timesteps, 0.02 * 1000 / timesteps, timesteps, dtype=torch.float64)
        alphas = 1.0 - betas
        alphas_cumprod = torch.cumprod(alphas, dim=0)
        alphas_cumprod_prev = F.pad(alphas_cumprod[:-1], (1, 0), value=1.0)
        self.num_timesteps = timesteps

        def register(name, value):
            self.register_buffer(name, value.to(torch.float32))

        register("betas", betas)
        register("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        register("sqrt_one_minus_alphas_cumprod", (1.0 - alphas_cumprod).sqrt())
        register("sqrt_recip_alphas_cumprod", (1.0 / alphas_cumprod).sqrt())
        register("sqrt_recipm1_alphas_cumprod", (1.0 / alphas_cumprod - 1).sqrt())
        posterior_variance = betas * (1.0 - alphas_cumprod_prev) / (1.0 - alphas_cumprod)
        register("posterior_log_variance_clipped", posterior_variance.clamp(min=1e-20).log())
        register("posterior_mean_coef1", betas * alphas_cumprod_prev.sqrt() / (1.0 - alphas_cumprod))
        register("posterior_mean_coef2", (1.0 - alphas_cumprod_prev) * alphas.sqrt() / (1.0 - alphas_cumprod))

    @property
    def device(self):
        return self.betas.device

    @torch.inference_mode()
    def p_sample(self, x, t):
        batched_times = torch.full((x.shape[0],), t, device=self.device, dtype=torch.long)
        pred_noise = self.model(x, batched_times)
        x_start = extract(self.sqrt_recip_alphas_cumprod, batched_times, x.shape) * x
        x_start = x_start - extract(self.sqrt_recipm1_alphas_cumprod, batched_times, x.shape) * pred_noise
        x_start.clamp_(-1.0, 1.0)
        model_mean = extract(self.posterior_mean_coef1, batched_times, x.shape) * x_start
        model_mean = model_mean + extract(self.posterior_mean_coef2, batched_times, x.shape) * x
        noise = torch.randn_like(x) if t > 0 else 0.0
        return model_mean + (0.5 * extract(self.posterior_log_variance_clipped, batched_times, x.shape)).exp() * noise

    @torch.inference_mode()
    def sample(self, batch_size=16):
        img = torch.randn((batch_size, self.channels, self.image_size, self.image_size), device=self.device)
        for t in tqdm(reversed(range(0, self.num_timesteps)), desc="sampling loop time step", total=self.num_timesteps):
            img = self.p_sample(img, t)
        return unnormalize_to_zero_to_one(img)

    def q_sample(self, x_start, t, noise):
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        x_start = normalize_to_neg_one_to_one(img)
        noise = torch.randn_like(x_start)
        model_out = self.model(self.q_sample(x_start, t, noise), t)
        loss = F.mse_loss(model_out, noise, reduction="none")
        return loss.flatten(1).mean(dim=1).mean()


class EMA(nn.Module):
    """Acts in every ``update_every``-th update: copies the model up to ``update_after_step``, then averages it."""

    def __init__(self, model, beta=0.995, update_after_step=20, update_every=5):
        super().__init__()
        self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
        self.online_model = [model]
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self):
        step = self.step.item()
        self.step += 1
        if step % self.update_every != 0:
            return
        online = self.online_model[0]
        if step <= self.update_after_step or not self.initted.item():
            self.ema_model.load_state_dict(online.state_dict())
            self.initted.data.copy_(torch.tensor(step > self.update_after_step))
            return
        for ma_param, current_param in zip(self.ema_model.parameters(), online.parameters()):
            ma_param.lerp_(current_param, 1.0 - self.beta)


class DigitImages(Dataset):
    def __init__(self):
        self.images = torch.from_numpy(digits("train")[0])[:, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class Trainer:
    def __init__(
        self, diffusion_model, dataset, *, watch, train_batch_size, gradient_accumulate_every, train_lr,
        train_num_steps, ema_update_every, ema_decay, save_and_sample_every, num_samples, results_folder,
    ):  # fmt: skip
        self.accelerator = Accelerator(mixed_precision="no", cpu=True)
        self.model = diffusion_model
        self.watch = watch
        self.num_samples, self.save_and_sample_every = num_samples, save_and_sample_every
        self.batch_size, self.gradient_accumulate_every = train_batch_size, gradient_accumulate_every
        self.train_num_steps = train_num_steps
        dl = DataLoader(dataset, batch_size=train_batch_size, shuffle=True, num_workers=0)
        dl = self.accelerator.prepare(dl)
        self.dl = cycle(dl)
        self.opt = Adam(diffusion_model.parameters(), lr=train_lr, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.ema = EMA(diffusion_model, beta=ema_decay, update_every=ema_update_every)
        self.results_folder = Path(results_folder)
        self.results_folder.mkdir(exist_ok=True)
        self.step = 0
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)
        self.losses = []

    def save(self, milestone):
        if not self.accelerator.is_local_main_process:
            return
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if exists(self.accelerator.scaler) else None,
        }
        torch.save(data, str(self.results_folder / f"model-{milestone}.pt"))

    def train(self):
        accelerator = self.accelerator
        with (
            self.watch(self.model, self.opt, accumulation=self.gradient_accumulate_every),
            tqdm(initial=self.step, total=self.train_num_steps, disable=not accelerator.is_main_process) as pbar,
        ):
            while self.step < self.train_num_steps:
                self.model.train()
                total_loss = 0.0
                for _ in range(self.gradient_accumulate_every):
                    data = next(self.dl).to(accelerator.device)
                    with self.accelerator.autocast():
                        loss = self.model(data)
                        loss = loss / self.gradient_accumulate_every
                        total_loss += loss.item()
                    self.accelerator.backward(loss)
                pbar.set_description(f"loss: {total_loss:.4f}")
                self.losses.append(total_loss)

                accelerator.wait_for_everyone()
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad()
                accelerator.wait_for_everyone()

                self.step += 1
                if accelerator.is_main_process:
                    self.ema.update()
                    if self.step != 0 and self.step % self.save_and_sample_every == 0:
                        self.ema.ema_model.eval()
                        with torch.inference_mode():
                            milestone = self.step // self.save_and_sample_every
                            batches = num_to_groups(self.num_samples, self.batch_size)
                            all_images_list = [self.ema.ema_model.sample(batch_size=n) for n in batches]
                        all_images = torch.cat(all_images_list, dim=0)
                        nrow = int(math.sqrt(self.num_samples))
                        save_image(all_images, str(self.results_folder / f"sample-{milestone}.png"), nrow=nrow)
                        self.save(milestone)
                pbar.update(1)
        accelerator.print("training complete")


def main(watch, seed, folder):
    torch.manual_seed(seed)
    model = Unet(dim=16)
    diffusion = GaussianDiffusion(model, image_size=8, timesteps=50)
    trainer = Trainer(
        diffusion, DigitImages(), watch=watch, train_batch_size=32, gradient_accumulate_every=2, train_lr=3e-3,
        train_num_steps=180, ema_update_every=5, ema_decay=0.8, save_and_sample_every=60, num_samples=16,
        results_folder=folder,
    )  # fmt: skip
    trainer.train()
    real = torch.from_numpy(digits("test")[0])[:100, None]
    distance = sliced_wasserstein(trainer.ema.ema_model.sample(batch_size=100), real)
    objects = {"model": trainer.model, "ema": trainer.ema, "optimizer": trainer.opt}
    return Result("distance to test images", distance, 0.1, trainer.losses, objects, higher_is_better=False)
