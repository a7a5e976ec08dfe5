"""The domains as text: one line a table, `table|synonym < parent:preposition ... : columns`.

A column is `name`, `name=low-high` for another range, or `name=pool` for another pool of values. `name=` and
`title=` label the rows: their values are unique in the table. The preposition joins the two tables in a question,
as in "students at schools".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LABELS = ("name", "title")

# Never in the training split, so that the test split measures domains that the model has not met.
UNSEEN = ("airline", "museum", "farm")

_TEXT = {
    "school": """
        school|academy : name=place city country founded budget capacity
        teacher < school:at : name=person age gender subject salary city experience phone
        student|pupil < school:at : name=person age=6-18 gender city height weight nickname
        course|lesson < teacher:by : title=title subject credits level hours
        enrollment < student:of course:in : grade year status
        club < school:at : name=team day budget type=sport
    """,
    "hospital": """
        hospital|clinic : name=place city country founded capacity budget
        doctor|physician < hospital:at : name=person age gender salary experience city phone
        patient < doctor:of : name=person age=1-90 gender city weight height email
        department < hospital:in : name=title type=ward floors=1-12 budget rooms
        visit < patient:by doctor:to : day year duration price status
        nurse < department:in : name=person age salary level gender
    """,
    "shop": """
        shop|store : name=place city country founded area sales
        customer|client < shop:of : name=person age gender city email level points
        product|item < shop:in : name=item price color stock brand weight rating
        purchase < customer:by product:of : quantity amount day payment status
        supplier < shop:of : name=place country city rating founded
        seller < shop:in : name=person age salary gender experience
    """,
    "library": """
        library : name=place city country founded area visitors
        author|writer : name=person country birth_year gender language rating
        book|novel < author:by library:in : title=title genre year pages price language
        member|reader < library:of : name=person age gender city phone points
        loan < member:by book:of : year day duration status
        event < library:at : title=title day visitors=10-300 price season
    """,
    "music": """
        band : name=place country founded genre=music rating sales
        singer|artist < band:in : name=person age gender country city nickname
        album|record < band:by : title=title year genre=music sales price rating
        song|track < album:on : title=title duration rating language votes
        concert|show < band:by : title=title year city price visitors season
        fan < singer:of : name=person age city gender points
    """,
    "cinema": """
        director : name=person age country gender birth_year nickname
        film|movie < director:by : title=title year genre duration budget rating language
        actor : name=person age gender country height rating
        role < actor:of film:in : type=award salary duration hours
        cinema|theater : name=place city capacity founded country
        screening < film:of cinema:at : day price visitors=10-400 season
        review < film:of : rating language votes year
    """,
    "sports": """
        stadium|arena : name=place city country capacity founded
        team < stadium:at : name=team city sport wins budget founded
        player < team:in : name=person age position height weight salary goals country
        coach|trainer < team:of : name=person age experience salary country gender
        game < team:of stadium:at : day year points visitors season
        sponsor < team:of : name=place industry amount country
    """,
    "restaurant": """
        restaurant|cafe : name=place city type=cuisine rating capacity founded
        chef|cook < restaurant:at : name=person age salary experience country gender
        dish|meal < restaurant:at : name=food price type=course weight rating size
        waiter < restaurant:at : name=person age salary gender phone city
        guest < restaurant:of : name=person age city gender points email
        bill < guest:of waiter:by : amount day payment year
    """,
    "company": """
        company|firm : name=place city country industry founded sales
        branch|office < company:of : name=title city floors area budget
        employee|worker < branch:at : name=person age gender salary position=job experience phone
        project < branch:of : title=title budget year status duration
        task < employee:of project:in : hours level status day
        contract < company:of : year amount type=material duration status
    """,
    "hotel": """
        hotel|inn : name=place city country rating floors founded
        room < hotel:in : type=room price area floors capacity=1-6 color
        guest|visitor : name=person age gender country city email
        booking < guest:by room:of : year season duration=1-30 amount status payment
        manager < hotel:of : name=person age salary experience gender
        restaurant < hotel:in : name=food type=cuisine capacity price rating
    """,
    "housing": """
        district|quarter : name=place city population area country
        agent|broker < district:in : name=person age sales experience gender phone
        house|home < district:in agent:of : name=place type=house price=100-999 area rooms year color
        owner|landlord : name=person age city gender budget
        tenant < house:in : name=person age gender salary country nickname
        offer < house:of owner:by : amount=100-999 year status payment
    """,
    "transport": """
        driver : name=person age gender city experience salary
        route < driver:by : name=team length day type=car
        garage : name=place city capacity area founded
        car|vehicle < garage:in driver:of : name=title brand color price speed year fuel
        station|stop < route:on : name=place city visitors floors=1-5 founded
        repair < car:of garage:at : price duration day status
    """,
    "university": """
        university|college : name=place city country founded budget
        professor|lecturer < university:at : name=person age salary gender degree country
        student < university:at : name=person age=18-35 gender city degree points
        faculty < university:at : name=title subject budget floors capacity
        paper|article < professor:by : title=title year pages=4-60 language votes
        exam|test < student:by professor:by : grade day duration year
    """,
    "pets": """
        owner|keeper : name=person age gender city phone salary
        shelter : name=place city capacity budget founded
        pet < owner:of shelter:from : name=person type=pet age=1-20 weight color gender
        doctor|vet : name=person age experience salary city
        treatment < pet:of doctor:by : price day duration status
        volunteer < shelter:at : name=person age hours gender city
    """,
    "television": """
        channel : name=place country network founded language budget
        series < channel:on : title=title genre year rating language votes
        episode < series:of : title=title duration rating visitors season
        host|presenter < channel:on : name=person age gender salary country
        actor < series:in : name=person age gender height country nickname
        prize|award < series:of : type=award year amount country
    """,
    "election": """
        party : name=team country color founded budget
        candidate < party:of : name=person age gender city degree votes
        region : name=place population area country city
        ballot < candidate:for region:in : year votes status
        donor < party:of : name=person city amount age industry
        debate < region:in : title=title day duration visitors subject
    """,
    "airline": """
        airline|carrier : name=place country founded rating sales
        airport : name=place city country capacity area
        plane|aircraft < airline:of : name=title type=plane speed capacity year color
        pilot < airline:of : name=person age gender salary hours experience
        flight < plane:by airport:to : day distance duration price season
        passenger|traveler < flight:on : name=person age gender country phone
    """,
    "museum": """
        museum|gallery : name=place city country founded visitors area
        painter|sculptor : name=person country birth_year gender nickname
        artwork|piece < museum:in painter:by : title=title type=art year price material height=20-300
        guide < museum:at : name=person age language salary experience
        exhibition < museum:at : title=title year visitors price season
        tour < guide:by museum:at : day duration price capacity=5-40
    """,
    "farm": """
        farm|ranch : name=place city country area founded
        farmer < farm:on : name=person age gender experience phone
        animal|beast < farm:on : name=person type=animal age=1-15 weight color price
        field < farm:of : name=title crop area budget size
        harvest < field:from : year weight season price amount
        tractor < farm:on : name=team brand speed=10-60 year color
    """,
}

_LINE = re.compile(r"(?P<names>[\w|]+)(?: < (?P<parents>[\w: ]+?))? : (?P<columns>.+)")


@dataclass(frozen=True, slots=True)
class Entity:
    """A table that a database of the domain may have.

    Attributes:
        names: Its name, then synonyms.
        parents: Name of each table it refers to, with the preposition that leads there.
        columns: Name of each column, with the pool or range that replaces the usual one, or "".
    """

    names: tuple[str, ...]
    parents: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]


def _entity(line: str) -> Entity:
    match = _LINE.fullmatch(line)
    assert match, line
    parents = [parent.split(":") for parent in (match["parents"] or "").split()]
    columns = [column.partition("=") for column in match["columns"].split()]
    return Entity(
        names=tuple(match["names"].split("|")),
        parents=tuple((table, preposition) for table, preposition in parents),
        columns=tuple((name, override) for name, _, override in columns),
    )


DOMAINS = {
    domain: tuple(_entity(line.strip()) for line in text.strip().splitlines())
    for domain, text in _TEXT.items()
}
