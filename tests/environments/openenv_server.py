"""A server of OpenEnv's own package: a number to go up to, shown as a picture. `openenv_server.py PORT [LIE]`."""

import base64
import io
import os
import sys
import time

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from PIL import Image


class Move(Action):
    word: str


class Shown(Observation):
    message: str = ""
    picture: str = ""
    pixels: list | None = None


class Climb(Environment):
    """The word up brings it nearer to 3; other words are faults on demand."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.level = 0

    def shown(self, reward=None):
        file = io.BytesIO()
        Image.new("RGB", (48, 32), (60 * self.level, self.seed % 256, 0)).save(file, "PNG")
        return Shown(message=f"level {self.level}", picture=base64.b64encode(file.getvalue()).decode(),
                     done=self.level == 3, reward=reward, metadata={"progress": self.level / 3})

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.level, self.seed = kwargs.get("start", 0), seed or 0
        return self.shown()

    def step(self, action, timeout_s=None, **kwargs):
        if action.word == "die":
            os._exit(3)
        if action.word == "sleep":
            time.sleep(600)
        if action.word == "raise":
            raise KeyError("lost")
        if action.word == "huge":
            return Shown(message="x" * 2**27)
        if action.word == "pixels":
            return Shown(pixels=[[[1, 2, 3]] * 8] * 7 + [[[1, 2]] * 8])
        if action.word == "frame":
            return Shown(pixels=[[[1, 2, 3]] * 9] * 8)
        if action.word == "nan":
            return Shown(message="?", reward=float("nan"))
        if action.word == "broken":
            return Shown(picture="iVBORw0KGgo" + "A" * 200)
        self.level += action.word == "up"
        return self.shown(reward=float(action.word == "up"))

    @property
    def state(self):
        return State(step_count=self.level)


if __name__ == "__main__":
    app = create_fastapi_app(Climb, Move, Shown, max_concurrent_envs=int(sys.argv[2]) if len(sys.argv) > 2 else 64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
