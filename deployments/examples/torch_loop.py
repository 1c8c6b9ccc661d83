import torch
import torch_xla

from tpu.runtime import segment

device, truth = torch_xla.device(), torch.arange(8.0)
model = torch.nn.Linear(8, 1, bias=False).to(device)
adam = torch.optim.Adam(model.parameters(), lr=0.05)
state = {"model": model, "adam": adam}


def train(key):
    torch.manual_seed(key)
    x = torch.randn(64, 8)
    loss = (model(x.to(device))[:, 0] - (x @ truth).to(device)).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
    torch_xla.sync()
    return loss


torch.nn.init.zeros_(model.weight)
with segment.start() as seg:
    state = seg.restore(state)
    for step in seg.steps():
        loss = train(seg.seed * 1_000_003 + step)
        seg.log(step + 1, loss=loss)
        seg.checkpoint(step + 1, state)
