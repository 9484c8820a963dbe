"""The PPO stage: one controller, and four rooms below it. A room imports only from those below.

controller, update       the loop of the driver, and the calls that make experience and update models
  watching               guards, checks of a step, selection of the best version, utilisation
  sampling               rollouts of a step: which prompts, which engine, which rewards
  fleet                  the processes: ranks, engines, their placement, start and restart
  training               what a rank computes: experience, losses; the types of batches
"""
