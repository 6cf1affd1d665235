#!/usr/bin/env bash
# pytorch-forecasting 1.8.0 (torch 2.13.0 on a CPU): TFT's forecast of a series without history depends on its neighbours.
#
# Expected: a series that has only future rows (min_encoder_length=0, a cold start) gets the forecast that its own
# static values give, alone or in a batch. TFT makes the LSTM's first state of them, and the LSTM's page says that
# rows of length zero keep that state.
# Seen: behind other series, it gets the state of the batch's first series. At the front of a batch it gets its own
# one, but for the cell it gets the hidden state. Alone (or if no series of a batch has history) both are zeros. So
# three calls give three forecasts, and another first series gives one more. Nothing is raised. Series with history
# are not affected.
# Cause: models/nn/rnn.py. `LSTM.handle_no_encoding` calls `masked_scatter`, which takes the first numbers of its source
# and not those of the masked rows, and gives it `initial_hidden_state[0]` for the cell too. `RNN.forward` makes a zero
# state if all lengths are zero.
#
#     seed 0: alone 0.00; first of three 0.42; last of three 0.39; last, behind another first series 0.26
#     seed 1: alone 0.00; first of three 0.88; last of three 1.21; last, behind another first series 0.39
#     the other series, alone and in these batches: 0.00 apart
# (A small model with random weights. The largest difference of the new series' forecast from the one alone, in units of
# the forecasts' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile pytorch-forecasting==1.8.0 lightning==2.6.6 pandas==3.0.6 scikit-learn==1.9.1 \
    scikit-base==1.0.2 scipy==1.17.1 torchmetrics==1.9.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import logging

import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

logging.disable(logging.WARNING)
torch.set_num_threads(1)
HORIZON = 4
draw = np.random.default_rng(0)
rows = pd.concat([pd.DataFrame({"series": str(number), "time_idx": range(40), "size": float(number),
                                "known": np.sin(np.arange(40) * (number + 1) / 3), "y": 5 * number + draw.normal(size=40).cumsum()})
                  for number in range(5)], ignore_index=True)
train = TimeSeriesDataSet(rows, time_idx="time_idx", target="y", group_ids=["series"], max_encoder_length=12,
                          min_encoder_length=0, max_prediction_length=HORIZON, min_prediction_length=HORIZON,
                          static_categoricals=["series"], static_reals=["size"], time_varying_known_reals=["known"],
                          time_varying_unknown_reals=["y"])


def forecast(model, lengths: dict, batch_size=64) -> dict:
    """The forecasts of series that are this long, by their names; batches have the order of the names."""
    data = pd.concat([rows[rows.series == name].tail(length) for name, length in lengths.items()])
    data = TimeSeriesDataSet.from_dataset(train, data, predict=True, stop_randomization=True)
    got = model.predict(data.to_dataloader(train=False, batch_size=batch_size, num_workers=0), return_index=True,
                        trainer_kwargs={"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
                                        "enable_model_summary": False})
    return dict(zip(got.index.series, got.output))


for seed in (0, 1):
    torch.manual_seed(seed)
    model = TemporalFusionTransformer.from_dataset(train, hidden_size=16, attention_head_size=2, lstm_layers=2, dropout=0.0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.4)
    unit = torch.stack(list(forecast(model, dict.fromkeys("01234", 40)).values())).std()
    alone = forecast(model, {"2": HORIZON})["2"]
    again = forecast(model, {"2": HORIZON})["2"]
    calls = [forecast(model, lengths) for lengths in ({"2": HORIZON, "3": 40, "4": 40}, {"0": 40, "1": 40, "2": HORIZON},
                                                      {"1": 40, "2": HORIZON})]
    off = [float((call["2"] - alone).abs().max() / unit) for call in calls]
    single = forecast(model, dict.fromkeys("0134", 40), batch_size=1)
    others = max(float((call[name] - single[name]).abs().max() / unit) for call in calls for name in call if name != "2")
    print(f"seed {seed}: alone {float((again - alone).abs().max()):.2f}; first of three {off[0]:.2f}; last of three {off[1]:.2f};",
          f"last, behind another first series {float((calls[2]['2'] - calls[1]['2']).abs().max() / unit):.2f}")
    print(f"the other series, alone and in these batches: {others:.2f} apart")
    assert torch.equal(alone, again) and others < 1e-3, "the behaviour has changed"
    assert min(off) > 0.05 and (calls[2]["2"] - calls[1]["2"]).abs().max() > 0.05 * unit, "the behaviour has changed"
PY
