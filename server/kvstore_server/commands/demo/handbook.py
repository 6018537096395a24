"""A text for the demo to read, long enough that computing its keys and values takes a while."""

from typing import Final

INSTRUCTION: Final = "Read the handbook, then answer the question in one short sentence.\n\n"
FIRST_QUESTION: Final = "What colour is the boat house?"
NEXT_QUESTION: Final = "On which day is the mail fetched from the town?"
LAST_QUESTION: Final = "In which year was the tower built?"

HANDBOOK: Final = """\
Handbook of the lighthouse on Sel Island

1. The island
Sel Island lies four kilometres off the coast, at the mouth of the bay. It is eight hundred metres long \
and three hundred wide. There are no trees, because of the wind, but there is grass on the southern side, \
where nine sheep graze from April to October. The tower stands on the highest rock, at the northern end. \
It was built in 1874 from grey granite that came over by ship, and it is thirty-one metres tall. A path of \
flat stones leads from the tower to the harbour, past the house of the keepers and the garden. At low tide \
a bar of sand joins the island to a small rock called the Anvil. Do not walk there: the tide comes back \
faster than a person can run.

2. The people
Two keepers live on the island at any time, and each stays for six weeks. The head keeper decides when the \
boat may go out. The second keeper looks after the engines, the stores and the weather log. In summer \
there is also a guest, most often a student who counts birds. Everybody cooks in turn, and nobody goes to \
the harbour alone after dark. The dog, whose name is Biscuit, belongs to the lighthouse and not to a \
keeper; she stays when the keepers change. She is afraid of the fog horn, so keep her in the kitchen when \
it sounds.

3. The lamp
The lamp is switched on half an hour before sunset and off half an hour after sunrise. It gives two white \
flashes every fifteen seconds, and on a clear night it can be seen from a distance of twenty-two sea \
miles. The lens weighs more than two tonnes and floats in a bath of oil, so that a child could turn it \
with one hand. Clean the lens every Monday with soft cloth and clear alcohol, never with soap. If the \
motor of the lens fails, there is a crank in the red cupboard; it takes one turn every ten seconds, and \
the two keepers change every half hour. A second lamp, which is smaller and runs on batteries, stands on \
the gallery. It has to be tested on the first day of each month, and the result goes into the log with \
date, time and signature.

4. The fog horn
The horn is started when the Anvil can no longer be seen from the kitchen window. It sounds for three \
seconds in every minute. The air for it comes from two tanks, which are filled by a compressor in the \
cellar. The pressure must be between six and eight bar. Below six bar the horn is too weak to be heard by \
a ship; above eight the valve opens, which is loud but not dangerous. Wear ear protection on the gallery \
whenever the horn is ready to sound, even if the weather seems to be getting better. After the fog has \
gone, let the horn sound for ten more minutes, since ships further out may still be in it.

5. Power and water
Power comes from sixteen solar panels on the roof of the house and from a wind turbine behind the garden. \
They charge a battery that lasts three days. When less than a third is left, start the diesel engine in \
the cellar and let it run for four hours. There is fuel for forty days; a tanker brings more in May and in \
September. Rain from the roof is collected in a cistern of twenty thousand litres. It is filtered twice \
and then safe to drink, but boil it in the weeks when the gulls are nesting. A shower may take three \
minutes. The garden is watered with what is left from the kitchen, in the evening, and never with sea \
water, however dry the summer is.

6. The boat
The boat is seven metres long, has a diesel engine of forty horsepower, and carries six people. It is kept \
in the boat house, which is painted yellow so that it can be found in bad light. Before it goes out, check \
fuel, oil, radio, flares and life jackets, and write the names of all on board on the slate beside the \
door. With a wind above six the boat stays where it is, whatever the reason for the trip may be. The mail \
is fetched from the town on Thursdays. On the way back, keep the church tower in line with the white mark \
on the pier until the second buoy, then turn north. The bottom there is rock, and the chart, which is from \
1988, shows more water than there is.

7. The weather log
Every three hours, day and night, the keeper on watch writes down the wind, the pressure, the temperature \
of air and sea, the state of the sky and how far one can see. The numbers go to the weather office by \
radio. If the radio fails, use the telephone in the hall, and if that fails too, hoist the blue flag, \
which can be seen from the coast guard station with a good glass. A reading that was missed is left empty; \
it is never filled in later from memory. The log has been kept without a gap since 1881, through two wars \
and one fire, and we should like it to stay so.

8. Visitors
Visitors may come on Saturdays from June to August, at most twelve at a time. They wait at the harbour \
until a keeper meets them. They may climb the tower, all one hundred and fifty-eight steps of it, in \
groups of four, and they may not touch the lens. Children must hold the rail. There is tea in the kitchen \
afterwards, and a tin on the shelf for those who want to give something towards the roof. The last boat \
back leaves at five o'clock, and it does not wait.

9. When something goes wrong
In case of fire, close the iron doors on the stairs first, then call the coast guard on channel sixteen, \
then use the extinguishers, of which there is one on each landing. In case of illness, the doctor in the \
town can be reached at any hour; the number is on the wall next to the telephone. The helicopter lands on \
the grass in the south: take the sheep away, and tie down everything that could fly. If a ship is seen in \
distress, note the time and the bearing, light the red flare, and do not take out the boat before the \
coast guard has answered. Afterwards, write down what happened on the same day, while it is fresh, \
including what could have been done better. The handbook is changed twice a year, and most of its rules \
began as one of those notes.
"""
