"""Services of a run: models other than the policy, which compute reward parts. Tasks only know the protocols in
task/services.py.

    chat              requests to an OpenAI-compatible server, with retries
    judge             the service `services.judge`; judge_prompts has its prompts, reply_cache its stored replies
    clip              the service `services.clip`
    reward_model      the service `services.reward_model`
    likelihoods       the services `policy_logprobs` and `reference_logprobs`
    extra_parts       the reward parts of `task.parts`; judged_parts, compared_parts and scored_parts implement them
    service_set       the services of a run, and access to them for one group
    missing           removes reward parts whose service the run does not have
    judge_server      starts a vLLM server for the judge
    served_teacher    log-probabilities of the teacher of algo.distillation, from a server"""
