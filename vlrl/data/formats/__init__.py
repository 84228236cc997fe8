"""Annotation formats of other projects: functions that recognise their records and convert them to canonical rows."""
