"""The frame of a verb's command line, without another process."""

import pytest

from eagle3_jax import command


def test_a_stop_is_no_success(capsys):
    with pytest.raises(SystemExit) as ended, command.run("train"):
        raise command.Stopped
    assert ended.value.code == command.STOPPED == 75
    assert "eagle3_jax.train: stopped by SIGTERM; run it again, and it goes on from here" in capsys.readouterr().err
