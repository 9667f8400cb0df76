"""All that can be set, declared once: of the intake, of a plan, of a machine and of a tuning."""
