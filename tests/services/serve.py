"""A judge as a process of its own that can be killed: python -m tests.services.serve PORT."""

import sys
import time

from tests.evaluation.http_stand_in import StandIn, served

if __name__ == "__main__":
    StandIn.port = int(sys.argv[1])
    with served(lambda body, number: f"re: {body['messages'][0]['content']}", models=("critic",)) as server:
        print(server.url, flush=True)
        time.sleep(600)
