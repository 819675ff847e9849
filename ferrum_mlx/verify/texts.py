"""What is read: ten beginnings to go on with, and a text to judge a model's likelihoods by."""

from __future__ import annotations

TEXTS = (  # ten, because the rule allows one near-tie in ten; each longer than a default block of 16 tokens
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down in his book that",
    "Water boils at one hundred degrees Celsius at sea level, but on the top of a high mountain it boils at",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,",
    "Dear Sir or Madam, thank you for your letter of the third of March, in which you ask whether we could",
    "The capital of France is Paris, the capital of Italy is Rome, the capital of Spain is Madrid, and the",
    "Once upon a time there was a small dog who lived in a big house near the forest, and every morning he",
    "To bake bread you need flour, water, salt and yeast. First mix the flour with the salt, then add the",
    "The train left the station at 9:15 and arrived at 11:45, so the journey took two hours and a half; the",
    "In mathematics, a prime number is a whole number greater than one that has no positive divisors except",
)
REPORT = """\
The harbour of Lindholm lies on the northern side of a narrow bay, sheltered from the west wind by a row of
low granite hills. For most of its history it was a fishing village with some forty houses, a wooden church
and a single pier. In the spring of 1874 a company from the capital bought the land behind the pier and
built a shipyard there, and within ten years the village had become a small town. The yard made wooden
schooners at first, later iron steamers, and at its best time it gave work to six hundred people. A railway
reached the town in 1891. It carried timber to the yard in the morning and workers back to the inland
villages in the evening. When the yard closed in 1932, the railway went on for another twenty years with
two trains a day, and then it was taken up and the rails were sold. Today the old station is a library.
The pier has been repaired with stone, and the ferry to the islands leaves from it four times a day in
summer and once a day in winter. Visitors come for the quiet, for the smoked herring that is sold from a
blue hut next to the church, and for the small museum in the former drawing office of the yard, where the
plans of every ship are kept in flat wooden drawers. The museum is open from Tuesday to Sunday."""
PROSE = "\n\n".join((REPORT, *TEXTS))
